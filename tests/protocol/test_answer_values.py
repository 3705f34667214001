"""How large an answer may become is known, and bounded, before anything is generated."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagemill_api.dialects.base import Preparation
from pagemill_api.dialects.registry import dialect_of
from pagemill_api.openai.prepare import within_vocabulary
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import GenerateRequest

CONTEXT = 131_072
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "m", "prompt": "Hi"}
TGI = {"inputs": "a", "model": "m", "parameters": {"details": True, "top_n_tokens": 9, "max_new_tokens": 101}}


def prepared(
    tokenizer: Tokenizer, dialect: str, body: dict[str, Any], most_values: int = 2_000_000
) -> list[GenerateRequest]:
    parsed = dialect_of(dialect).parse(json.dumps(body).encode())
    sampling = within_vocabulary(parsed.sampling(), tokenizer)
    return parsed.prepare(tokenizer, Preparation(CONTEXT, "r", 7, max_answer_values=most_values), sampling, "Hi")


def chat(tokenizer: Tokenizer, **fields: Any) -> GenerateRequest:
    (request,) = prepared(tokenizer, "chat", {**CHAT, **fields})
    return request


def test_a_product_of_choices_tokens_and_log_probabilities_is_refused_by_the_names_of_all_three(
    byte_tokenizer: Tokenizer,
) -> None:
    with pytest.raises(PagemillError) as caught:
        chat(byte_tokenizer, n=128, logprobs=True, top_logprobs=20, max_tokens=1000)
    error = caught.value
    assert (error.status, error.param) == (400, "max_tokens")
    for name in ("`n` (128)", "`max_tokens` (1000)", "`top_logprobs`", "2688000", "2000000", "at most 744"):
        assert name in error.message
    assert chat(byte_tokenizer, n=128, logprobs=True, top_logprobs=20, max_tokens=744).sampling.max_tokens == 744
    with pytest.raises(PagemillError, match="max_completion_tokens"):
        chat(byte_tokenizer, n=128, logprobs=True, top_logprobs=20, max_completion_tokens=1000)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 128},
        {"n": 128, "max_tokens": CONTEXT // 2},
        {"logprobs": True, "top_logprobs": 20},
        {"logprobs": True, "top_logprobs": 20, "max_tokens": 95_000},
        {"n": 128, "logprobs": True, "top_logprobs": 20},
        {"n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 1000, "stream": True},
    ],
)
def test_each_of_them_alone_and_a_stream_are_served(byte_tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    request = chat(byte_tokenizer, **fields)
    assert request.sampling.max_tokens is not None
    num_values = request.values_per_token * request.sampling.n * request.sampling.max_tokens
    assert num_values <= 2_000_000


def test_an_answer_without_a_limit_ends_where_it_has_the_most_values(byte_tokenizer: Tokenizer) -> None:
    assert chat(byte_tokenizer, n=128, logprobs=True, top_logprobs=20).sampling.max_tokens == 744
    assert chat(byte_tokenizer, n=128).sampling.max_tokens == CONTEXT - 2
    (_, second) = prepared(byte_tokenizer, "completions", {**COMPLETION, "prompt": ["a", "b"], "logprobs": 4}, 100)
    assert second.sampling.max_tokens == 10


@pytest.mark.parametrize(
    ("dialect", "body", "names"),
    [
        ("completions", {**COMPLETION, "n": 4, "logprobs": 4, "max_tokens": 100}, ["`n` (4)", "`logprobs`"]),
        ("completions", {**COMPLETION, "best_of": 20, "logprobs": 0, "max_tokens": 60}, ["`best_of` (20)"]),
        (
            "completions",
            {**COMPLETION, "n": 20, "use_beam_search": True, "logprobs": 0, "max_tokens": 60, "temperature": 0},
            ["`n` (20)"],
        ),
        ("completions", {**COMPLETION, "prompt": ["a"] * 50, "logprobs": 1, "max_tokens": 16}, ["50 prompts"]),
        ("completions", {**COMPLETION, "return_token_ids": True, "max_tokens": 1001}, ["`return_token_ids`"]),
        ("chat", {**CHAT, "logprobs": True, "logprob_token_ids": [1, 2, 3], "max_tokens": 300}, ["logprob_token_ids"]),
        ("tgi", TGI, ["`max_new_tokens` (101)"]),
    ],
)
def test_every_way_to_many_values_counts(
    byte_tokenizer: Tokenizer, dialect: str, body: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(PagemillError) as caught:
        prepared(byte_tokenizer, dialect, body, 1000)
    assert caught.value.status == 400
    assert all(name in caught.value.message for name in [*names, "At most 1000"])


def test_an_echo_that_no_frame_could_hold_is_refused(byte_tokenizer: Tokenizer) -> None:
    body = {**COMPLETION, "echo": True, "max_tokens": 1, "n": 128}
    prepared(byte_tokenizer, "completions", {**body, "prompt": ["a" * 100_000] * 3})
    with pytest.raises(PagemillError) as caught:  # each of these characters takes six bytes in JSON
        prepared(byte_tokenizer, "completions", {**body, "prompt": ["\x02" * 100_000] * 3})
    assert (caught.value.param, "`n` (128)" in caught.value.message) == ("echo", True)
