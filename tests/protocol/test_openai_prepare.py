"""The translation of requests to tokens: limits, defaults and ids as clients of OpenAI and vLLM expect them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from pagemill_api.dialects.chat_completions.chat import ChatDialect
from pagemill_api.dialects.chat_completions.completions import CompletionsDialect
from pagemill_api.openai import prepare
from pagemill_api.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pagemill_api.text.fill_in_middle import KNOWN, Markers
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import GenerateRequest

MESSAGES = [{"role": "user", "content": "hi"}]
RENDERED = "<user>hi<assistant>"


def chat(
    tokenizer: Tokenizer, max_model_len: int = 100, options: dict[str, Any] | None = None, **fields: Any
) -> GenerateRequest:
    request = ChatCompletionRequest.model_validate({"model": "m", "messages": MESSAGES, **fields})
    return prepare.prepare_chat(
        request, tokenizer, max_model_len=max_model_len, request_id="chatcmpl-1", created_unix_s=7, **(options or {})
    )


def completions(tokenizer: Tokenizer, max_model_len: int = 100, **fields: Any) -> list[GenerateRequest]:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "hello", **fields})
    return prepare.prepare_completions(
        request, tokenizer, max_model_len=max_model_len, request_id="cmpl-1", created_unix_s=7
    )


def test_a_chat_is_rendered_and_tokenized(byte_tokenizer: Tokenizer) -> None:
    request = chat(byte_tokenizer, stream=True, stream_options={"include_usage": True}, priority=3)
    assert request.prompt_token_ids == byte_tokenizer.encode(RENDERED)
    assert (request.request_id, request.response_id, request.model, request.created_unix_s) == (
        "chatcmpl-1",
        "",
        "m",
        7,
    )
    assert (request.dialect, request.stream, request.include_usage, request.priority) == ("chat", True, True, 3)


@pytest.mark.parametrize(
    ("options", "continuous"),
    [
        (None, False),
        ({"include_usage": True}, False),
        ({"continuous_usage_stats": True}, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False),
        ({"include_usage": True, "continuous_usage_stats": False}, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True),
    ],
)
def test_usage_is_in_every_chunk_if_both_options_are_set(
    byte_tokenizer: Tokenizer, options: dict[str, bool] | None, continuous: bool
) -> None:
    fields = {"stream": True, "stream_options": options}
    assert chat(byte_tokenizer, **fields).continuous_usage is continuous
    requests = completions(byte_tokenizer, prompt=["a", "b"], **fields)
    assert [request.continuous_usage for request in requests] == [continuous, continuous]


def test_a_chat_without_limit_may_fill_the_context(byte_tokenizer: Tokenizer) -> None:
    assert chat(byte_tokenizer).sampling.max_tokens == 100 - len(RENDERED)
    assert chat(byte_tokenizer, max_tokens=5).sampling.max_tokens == 5
    assert chat(byte_tokenizer, max_tokens=5, max_completion_tokens=6).sampling.max_tokens == 6


def test_a_completion_without_limit_gets_sixteen_tokens_or_those_that_fit(byte_tokenizer: Tokenizer) -> None:
    assert completions(byte_tokenizer)[0].sampling.max_tokens == 16
    assert completions(byte_tokenizer, max_model_len=9)[0].sampling.max_tokens == 4


def test_an_unknown_context_length_is_checked_by_the_engine(byte_tokenizer: Tokenizer) -> None:
    assert chat(byte_tokenizer, max_model_len=0).sampling.max_tokens is None
    assert completions(byte_tokenizer, max_model_len=0)[0].sampling.max_tokens == 16


def test_a_prompt_that_fills_the_context_is_refused(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(
        PagemillError, match=f"context length is {len(RENDERED)} tokens.*has {len(RENDERED)} tokens"
    ) as caught:
        chat(byte_tokenizer, max_model_len=len(RENDERED))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.param == "messages"
    assert chat(byte_tokenizer, max_model_len=len(RENDERED) + 1).sampling.max_tokens == 1


def test_an_answer_that_cannot_fit_is_refused_with_both_numbers(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(
        PagemillError, match=r"length is 100 tokens.*has 5 tokens .*asks for 96 more, together 101.*at most 95"
    ) as caught:
        completions(byte_tokenizer, max_tokens=96)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(PagemillError) as caught:
        chat(byte_tokenizer, max_completion_tokens=1000)
    assert caught.value.param == "max_completion_tokens"
    assert completions(byte_tokenizer, max_tokens=95)[0].sampling.max_tokens == 95


@pytest.mark.parametrize("limit", [0, -1])
def test_a_token_limit_below_one_is_refused(byte_tokenizer: Tokenizer, limit: int) -> None:
    with pytest.raises(PagemillError, match="at least 1") as caught:
        chat(byte_tokenizer, max_completion_tokens=limit)
    assert caught.value.param == "max_completion_tokens"


def test_megabytes_of_text_are_refused_without_tokenizing_them(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for way in ("encode", "encode_cut"):
        monkeypatch.setattr(byte_tokenizer, way, lambda text, *_, **__: pytest.fail(f"{len(text)} were tokenized"))
    with pytest.raises(
        PagemillError, match=r"context length is 100 tokens.*8000000 bytes of text and at most 100 are"
    ) as caught:
        completions(byte_tokenizer, prompt="a" * 8_000_000)
    assert caught.value.code == "context_length_exceeded"


def test_an_unused_tokenizer_is_freed(byte_tokenizer: Tokenizer) -> None:
    tokenizer = Tokenizer(byte_tokenizer.bundle)
    with pytest.raises(PagemillError, match=r"context length is 100 tokens.*8000000 bytes of text and at most 100 are"):
        completions(tokenizer, prompt="a" * 8_000_000)
    watch = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert watch() is None


def test_truncate_prompt_tokens_keeps_the_last_tokens_of_a_prompt(byte_tokenizer: Tokenizer) -> None:
    long, ids = "x" * 300 + "end", byte_tokenizer.encode("end")
    assert completions(byte_tokenizer, prompt=long, truncate_prompt_tokens=3)[0].prompt_token_ids == ids
    (most,) = completions(byte_tokenizer, prompt=long, truncate_prompt_tokens=-1, max_tokens=40, echo=True)
    assert (len(most.prompt_token_ids), most.prompt_token_ids[-3:]) == (60, ids)
    assert most.prompt_text == long[-60:], "the echo must be the truncated prompt"
    (given,) = completions(byte_tokenizer, prompt=[5, 6, 7], truncate_prompt_tokens=2)
    assert given.prompt_token_ids == [6, 7]
    assert chat(byte_tokenizer, truncate_prompt_tokens=4).prompt_token_ids == byte_tokenizer.encode(RENDERED)[-4:]
    assert len(chat(byte_tokenizer, truncate_prompt_tokens=10**6).prompt_token_ids) == len(RENDERED)
    with pytest.raises(PagemillError) as refused:
        completions(byte_tokenizer, truncate_prompt_tokens=0)
    assert refused.value.param == "truncate_prompt_tokens"
    with pytest.raises(PagemillError, match="maximum context length"):
        completions(byte_tokenizer, prompt=long, truncate_prompt_tokens=200)


@pytest.mark.parametrize("markers", KNOWN, ids=lambda markers: markers.before_middle)
def test_a_suffix_makes_a_fill_in_the_middle_prompt(
    with_tokens: Callable[[Sequence[str]], Tokenizer], markers: Markers
) -> None:
    tokenizer = with_tokens(markers)
    (request,) = completions(tokenizer, prompt="be", suffix="end")
    assert request.prompt_token_ids == [256, *tokenizer.encode("be"), 257, *tokenizer.encode("end"), 258]
    assert completions(tokenizer, prompt="be", suffix="")[0].prompt_token_ids == tokenizer.encode("be")


def test_a_suffix_for_a_model_without_such_tokens_is_refused_by_name(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(PagemillError, match="no tokens for that") as refused:
        completions(byte_tokenizer, suffix="end")
    assert refused.value.param == "suffix"


def test_several_prompts_make_several_requests_of_one_response(byte_tokenizer: Tokenizer) -> None:
    requests = completions(byte_tokenizer, prompt=["ab", [1, 2, 3]], n=2)
    assert [request.prompt_token_ids for request in requests] == [byte_tokenizer.encode("ab"), [1, 2, 3]]
    assert [request.request_id for request in requests] == ["cmpl-1-0", "cmpl-1-1"]
    assert {request.response_id for request in requests} == {"cmpl-1"}
    assert [request.prompt_index for request in requests] == [0, 1]


def test_the_invalid_prompt_of_several_is_named(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(PagemillError) as caught:
        completions(byte_tokenizer, prompt=["a", "b" * 200])
    assert caught.value.param == "prompt[1]"


def test_token_ids_outside_the_vocabulary_are_refused(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(PagemillError, match="256; this model's token ids go from 0 to 255") as caught:
        completions(byte_tokenizer, prompt=[1, 256])
    assert caught.value.param == "prompt"
    with pytest.raises(PagemillError, match="stop_token_ids"):
        chat(byte_tokenizer, stop_token_ids=[999])
    with pytest.raises(PagemillError, match="logit_bias"):
        chat(byte_tokenizer, logit_bias={"999": 1.0})


def test_an_echo_without_output_requests_one_token_of_the_engine(byte_tokenizer: Tokenizer) -> None:
    (request,) = completions(byte_tokenizer, echo=True, logprobs=1, max_tokens=0)
    assert (request.sampling.max_tokens, request.prompt_only, request.num_prompt_logprobs) == (1, True, 1)
    with pytest.raises(PagemillError) as caught:
        completions(byte_tokenizer, max_tokens=0)
    assert caught.value.param == "max_tokens"


def test_prompt_logprobs_are_requested_by_name_or_by_an_echo(byte_tokenizer: Tokenizer) -> None:
    asked = [{"logprobs": 2}, {"echo": True}, {"prompt_logprobs": 0}, {"echo": True, "logprobs": 3}]
    both = {"echo": True, "logprobs": 1, "prompt_logprobs": 4}
    found = [completions(byte_tokenizer, **fields)[0].num_prompt_logprobs for fields in (*asked, both)]
    assert found == [None, None, 0, 3, 4]
    assert chat(byte_tokenizer, prompt_logprobs=2, logprobs=True).num_prompt_logprobs == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 20, "n": 128}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20, "n": 128}, "logprobs"),
        ({"prompt": ["a" * 90] * 150, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": ["a" * 99] * 60, "prompt_logprobs": 12, "echo": True, "logprobs": 12}, "prompt_logprobs"),
    ],
)
def test_the_number_of_prompt_logprobs_of_an_answer_is_bounded(
    byte_tokenizer: Tokenizer, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(PagemillError, match="at most 131072 are reported") as caught:
        completions(byte_tokenizer, **{"prompt": "a" * 99, **fields, "max_tokens": 1})
    assert caught.value.param == param


def test_bad_words_become_tokens_at_the_start_of_a_text_and_after_a_space(byte_tokenizer: Tokenizer) -> None:
    request = chat(byte_tokenizer, bad_words=[" ab", "c"])
    spelled = ["ab", " ab", "c", " c"]
    assert request.sampling.bad_word_token_ids == [byte_tokenizer.encode(text) for text in spelled]
    assert request.sampling.bad_words == [" ab", "c"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"allowed_token_ids": [1, 1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [2**30]}, "allowed_token_ids"),
        ({"logprob_token_ids": [-1], "logprobs": True}, "logprob_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["a"], "use_beam_search": True}, "bad_words"),
        ({"prompt_logprobs": 1, "use_beam_search": True}, "prompt_logprobs"),
        ({"allowed_token_ids": [1], "use_beam_search": True}, "allowed_token_ids"),
    ],
)
def test_invalid_token_values_are_refused_by_name(
    byte_tokenizer: Tokenizer, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(PagemillError) as caught:
        chat(byte_tokenizer, **fields)
    assert caught.value.param == param


def test_an_echo_includes_the_prompts_text(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("xyz")
    assert completions(byte_tokenizer, echo=True)[0].prompt_text == "hello"
    assert completions(byte_tokenizer, echo=True, prompt=ids)[0].prompt_text == "xyz"
    assert completions(byte_tokenizer)[0].prompt_text is None


def test_sampling_values_are_passed_on_and_range_checked(byte_tokenizer: Tokenizer) -> None:
    sampling = chat(
        byte_tokenizer,
        temperature=0.5,
        top_k=4,
        min_p=0.1,
        stop="END",
        logprobs=True,
        top_logprobs=2,
        logit_bias={"5": -3},
    ).sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.stop) == (0.5, 4, 0.1, ["END"])
    assert (sampling.logprobs, sampling.logit_bias) == (2, {5: -3})
    with pytest.raises(PagemillError) as caught:
        chat(byte_tokenizer, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(PagemillError) as caught:
        chat(byte_tokenizer, seed=2**63)
    assert caught.value.param == "seed"
    with pytest.raises(PagemillError) as caught:
        chat(byte_tokenizer, min_tokens=50, max_tokens=5)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("fields", [{"temperature": 3}, {"logit_bias": {"999": 1}}, {"stop": "x" * 2000}])
def test_an_invalid_value_is_refused_before_the_prompt_is_processed(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Otherwise a long prompt would cost its rendering and tokenizing first."""
    for name in ("encode", "render_chat"):
        monkeypatch.setattr(byte_tokenizer, name, lambda *args, **kwargs: pytest.fail("the prompt was processed"))
    for make in (chat, completions):
        with pytest.raises(PagemillError) as caught:
            make(byte_tokenizer, **fields)
        assert caught.value.param == next(iter(fields))


def test_a_minimum_above_the_default_limit_is_refused(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(PagemillError) as caught:
        completions(byte_tokenizer, min_tokens=17)
    assert caught.value.param == "min_tokens"
    assert completions(byte_tokenizer, min_tokens=16)[0].sampling.min_tokens == 16


def test_logprobs_are_requested_in_both_dialects(byte_tokenizer: Tokenizer) -> None:
    assert chat(byte_tokenizer, logprobs=True).sampling.logprobs == 0
    assert chat(byte_tokenizer).sampling.logprobs is None
    assert completions(byte_tokenizer, logprobs=3)[0].sampling.logprobs == 3


def test_the_clients_seed_takes_precedence_over_the_assigned_one(byte_tokenizer: Tokenizer) -> None:
    assert chat(byte_tokenizer, options={"seed": 5}).sampling.seed == 5
    assert chat(byte_tokenizer, seed=0, options={"seed": 5}).sampling.seed == 0


def test_the_models_defaults_apply_if_the_client_sends_none(byte_tokenizer: Tokenizer) -> None:
    values = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 7}
    tokenizer = Tokenizer(msgspec.structs.replace(byte_tokenizer.bundle, sampling_defaults=values))
    for prepared in (chat, completions):
        found = prepared(tokenizer, temperature=1.0)
        sampling = (found if prepared is chat else found[0]).sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (1.0, 0.9, 7)
    sampling = chat(tokenizer, temperature=None, max_tokens=30).sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.2, 30)


def test_the_cache_salt_comes_from_the_server_never_from_the_client(byte_tokenizer: Tokenizer) -> None:
    assert chat(byte_tokenizer, options={"cache_salt": "tenant"}).cache_salt == "tenant"


def test_a_final_message_can_be_continued(byte_tokenizer: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Sure"}]
    request = chat(byte_tokenizer, messages=messages, continue_final_message=True)
    assert byte_tokenizer.decode(request.prompt_token_ids) == "<user>hi<assistant>Sure"


def test_requests_survive_encoding(byte_tokenizer: Tokenizer) -> None:
    import msgspec

    request = chat(byte_tokenizer, n=2, stop=["a"], logit_bias={"5": 1.5}, seed=2**63 - 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerateRequest) == request


def test_tokenize_and_detokenize_are_inverse(byte_tokenizer: Tokenizer) -> None:
    ids = prepare.tokenize(TokenizeRequest.model_validate({"prompt": "hi"}), byte_tokenizer, 100)
    assert prepare.detokenize(DetokenizeRequest(tokens=ids), byte_tokenizer, 100) == "hi"
    rendered = prepare.tokenize(TokenizeRequest.model_validate({"messages": MESSAGES}), byte_tokenizer, 100)
    assert byte_tokenizer.decode(rendered) == RENDERED
    with pytest.raises(PagemillError) as caught:
        prepare.detokenize(DetokenizeRequest(tokens=[5000]), byte_tokenizer, 100)
    assert caught.value.param == "tokens"


def test_tokenize_and_detokenize_accept_what_a_context_holds(byte_tokenizer: Tokenizer) -> None:
    def tokenize(max_model_len: int, **fields: Any) -> list[int]:
        return prepare.tokenize(TokenizeRequest.model_validate(fields), byte_tokenizer, max_model_len)

    assert len(tokenize(5, prompt="hello")) == 5
    assert len(tokenize(0, prompt="a" * 5000)) == 5000, "the context length is not known yet"
    assert prepare.detokenize(DetokenizeRequest(tokens=[65] * 5), byte_tokenizer, 5)
    for refused, param in (
        (lambda: tokenize(4, prompt="hello"), "prompt"),
        (lambda: tokenize(len(RENDERED) - 1, messages=MESSAGES), "messages"),
        (lambda: prepare.detokenize(DetokenizeRequest(tokens=[65] * 5), byte_tokenizer, 4), "tokens"),
    ):
        with pytest.raises(PagemillError, match="This model's maximum context length is") as caught:
            refused()
        assert (caught.value.status, caught.value.param) == (400, param)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("prompt", ["a" * 90, [1] * 90])
def test_several_prompts_are_counted_together(
    byte_tokenizer: Tokenizer, prompt: str | list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "MAX_TOKENS_OF_SEVERAL", 270)
    assert len(completions(byte_tokenizer, prompt=[prompt] * 3, max_tokens=1)) == 3
    with pytest.raises(PagemillError, match="first 4 of 5 prompts have 360 tokens; at most 270 are allowed") as caught:
        completions(byte_tokenizer, prompt=[prompt] * 5, max_tokens=1)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_request_ids_are_unique_and_have_the_prefix_of_their_dialect() -> None:
    assert ChatDialect().new_request_id().startswith("chatcmpl-")
    assert CompletionsDialect().new_request_id().startswith("cmpl-")
    assert len({ChatDialect().new_request_id() for _ in range(1000)}) == 1000
