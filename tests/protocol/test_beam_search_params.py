"""`best_of` and beam search in requests: their meaning, their contradictions, and the low cost of a refusal."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import msgspec
import orjson
import pytest

from pagemill_api.openai import prepare
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.schemas import ChatCompletionRequest, CompletionRequest
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2}


def completion(tokenizer: Tokenizer, **fields: Any) -> GenerateRequest:
    raw = orjson.dumps({"model": "m", "prompt": "hello", **fields})
    (request,) = prepare.prepare_completions(
        parse_body(raw, CompletionRequest), tokenizer, max_model_len=100, request_id="cmpl-1", created_unix_s=7, seed=1
    )
    return request


def chat(tokenizer: Tokenizer, **fields: Any) -> GenerateRequest:
    raw = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})
    request, tokenizer = parse_body(raw, ChatCompletionRequest), with_defaults(tokenizer)
    return prepare.prepare_chat(request, tokenizer, max_model_len=100, request_id="chatcmpl-1", created_unix_s=7)


@cache
def with_defaults(tokenizer: Tokenizer) -> Tokenizer:
    values = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    return Tokenizer(msgspec.structs.replace(tokenizer.bundle, sampling_defaults=values))


def test_best_of_is_the_number_of_sequences_and_n_that_of_returned_choices(byte_tokenizer: Tokenizer) -> None:
    sampling = completion(byte_tokenizer, n=2, best_of=5).sampling
    assert (sampling.n, sampling.best_of, sampling.num_sequences, sampling.num_reported) == (2, 5, 5, 5)


def test_best_of_equal_to_n_is_plain_sampling(byte_tokenizer: Tokenizer) -> None:
    sampling = completion(byte_tokenizer, n=2, best_of=2, stream=True).sampling
    assert (sampling.best_of, sampling.num_reported) == (None, 2)


@pytest.mark.parametrize("width", ["best_of", "beam_width"])
def test_a_beam_search_runs_its_width_and_returns_n(byte_tokenizer: Tokenizer, width: str) -> None:
    fields = {"length_penalty": 0.5, "early_stopping": "never", width: 6}
    sampling = completion(byte_tokenizer, **BEAMS, **fields).sampling
    assert (sampling.n, sampling.num_sequences, sampling.num_reported) == (2, 6, 2)
    assert (sampling.length_penalty, sampling.early_stopping) == (0.5, "never")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams) == sampling


def test_the_models_sampling_defaults_do_not_apply_to_a_beam_search(byte_tokenizer: Tokenizer) -> None:
    assert chat(byte_tokenizer).sampling.temperature == 0.6
    sampling = chat(byte_tokenizer, **BEAMS).sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"n": 10**9}, "n", "at most 128, got 1000000000"),
        ({"best_of": 10**9}, "best_of", "at most 128, got 1000000000"),
        ({"best_of": 0}, "best_of", "at least 1, got 0"),
        ({"n": 3, "best_of": 2}, "best_of", "`best_of` (2) must be at least `n` (3)"),
        ({"best_of": 3, "stream": True}, "stream", "`best_of` equal to `n`"),
        ({"best_of": 3, "temperature": 0}, "best_of", "Raise temperature"),
        ({**BEAMS, "stream": True}, "stream", "Send `stream: false`"),
        ({**BEAMS, "beam_width": 1}, "beam_width", "`beam_width` (1) must be at least `n` (2)"),
        ({**BEAMS, "beam_width": 10**9}, "beam_width", "at most 128"),
        ({**BEAMS, "beam_width": 4, "best_of": 3}, "beam_width", "mean the same here. Send one"),
        ({"beam_width": 4}, "beam_width", "needs `use_beam_search: true`"),
        ({"use_beam_search": "yes"}, "use_beam_search", "true or false"),
        ({"length_penalty": 2.0}, "length_penalty", "only for beam search"),
        ({"early_stopping": True}, "early_stopping", "only for beam search"),
        ({**BEAMS, "early_stopping": "soon"}, "early_stopping", 'must be true, false or "never", got "soon"'),
        ({**BEAMS, "length_penalty": 11}, "length_penalty", "from -10 to 10, got 11"),
        ({**BEAMS, "temperature": 0.7}, "temperature", "temperature (0.7) does not go with use_beam_search"),
        ({**BEAMS, "top_k": 5}, "top_k", "Remove top_k (or send 0 or -1)"),
        ({**BEAMS, "top_p": 0.5}, "top_p", "does not go with use_beam_search"),
        ({**BEAMS, "min_p": 0.5}, "min_p", "does not go with use_beam_search"),
        ({**BEAMS, "presence_penalty": 1}, "presence_penalty", "does not go with use_beam_search"),
        ({**BEAMS, "frequency_penalty": -1}, "frequency_penalty", "does not go with use_beam_search"),
        ({**BEAMS, "repetition_penalty": 1.2}, "repetition_penalty", "does not go with use_beam_search"),
        ({**BEAMS, "logit_bias": {"5": 1}}, "logit_bias", "Remove logit_bias, or use_beam_search"),
        ({**BEAMS, "stop": ["x"]}, "stop", "Use stop_token_ids"),
    ],
)
def test_a_contradiction_is_refused_at_low_cost(
    byte_tokenizer: Tokenizer, fields: dict[str, Any], param: str, says: str
) -> None:
    took_s = []
    for _ in range(3):  # the garbage collector may run within one
        started_s = time.thread_time()
        with pytest.raises(PagemillError) as refused:
            completion(byte_tokenizer, **fields)
        took_s.append(time.thread_time() - started_s)
    assert min(took_s) < 0.05
    assert (refused.value.status, refused.value.param) == (400, param)
    assert says in refused.value.message
    with pytest.raises(PagemillError):
        chat(byte_tokenizer, **fields)


def test_the_product_of_prompts_and_candidates_is_bounded() -> None:
    raw = orjson.dumps({"model": "m", "prompt": ["a"] * 100, "best_of": 100})
    with pytest.raises(PagemillError) as refused:
        parse_body(raw, CompletionRequest)
    assert (refused.value.param, "10000 choices" in refused.value.message) == ("best_of", True)


def test_more_beams_than_tokens_are_refused() -> None:
    sampling = SamplingParams(n=8, use_beam_search=True)
    with pytest.raises(PagemillError, match="8 beams are more than the model has tokens"):
        sampling.validate(vocab_size=7)
    assert sampling.validate(vocab_size=8) is sampling


@pytest.mark.parametrize("wrong", [{"early_stopping": "soon"}, {"early_stopping": 3}, {"length_penalty": float("nan")}])
def test_the_offline_api_is_validated_too(wrong: dict[str, Any]) -> None:
    (param,) = wrong
    with pytest.raises(PagemillError) as refused:
        SamplingParams(use_beam_search=True, **wrong).validate()
    assert refused.value.param == param
