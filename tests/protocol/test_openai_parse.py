"""Request bodies: everything malformed is a 400 in OpenAI's format that names the field."""

from __future__ import annotations

import json
import time
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from examples import num_examples
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.prepare import sampling_of
from pagemill_api.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pagemill_protocol.errors import PagemillError

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_body(orjson.dumps({**CHAT, **fields}), ChatCompletionRequest)


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(orjson.dumps({**COMPLETION, **fields}), CompletionRequest)


def refused(raw: bytes, schema: type[BaseModel] = ChatCompletionRequest) -> PagemillError:
    with pytest.raises(PagemillError) as caught:
        parse_body(raw, schema)
    error = caught.value
    assert error.status == 400
    assert error.type == "invalid_request_error"
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}
    orjson.dumps(error.body())
    return error


def assert_parsed_or_refused(raw: bytes, schema: type[BaseModel]) -> None:
    try:
        parse_body(raw, schema)
    except PagemillError:
        refused(raw, schema)


def refused_chat(**fields: Any) -> PagemillError:
    return refused(orjson.dumps({**CHAT, **fields}))


def refused_completion(**fields: Any) -> PagemillError:
    return refused(orjson.dumps({**COMPLETION, **fields}), CompletionRequest)


def test_defaults_are_those_of_the_api() -> None:
    request = chat()
    assert (request.n, request.temperature, request.top_p, request.stream) == (1, 1.0, 1.0, False)
    assert request.requested_tokens is None
    assert request.stop == []


def test_null_means_default_for_every_optional_field() -> None:
    names = [*ChatCompletionRequest.model_fields, "tools", "response_format", "audio", "functions", "suffix"]
    nulls = {name: None for name in names if name not in CHAT}
    assert chat(**nulls) == chat()
    assert (
        completion(**{name: None for name in CompletionRequest.model_fields if name not in COMPLETION}) == completion()
    )


def test_unknown_fields_are_ignored() -> None:
    assert chat(frobnicate={"a": [1, 2, {}]}, metadata={"k": "v"}) == chat()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("chat_template", "{{ 1 }}"),
        ("prompt_embeds", "AAAA"),
        ("cache_salt", "mine"),
        ("kv_transfer_params", {}),
        ("echo", True),
    ],
)
def test_known_but_unsupported_fields_are_refused_with_a_remedy(field: str, value: Any) -> None:
    error = refused_chat(**{field: value})
    assert error.param == field
    assert error.code == "unsupported_parameter"
    assert field in error.message
    assert len(error.message) > len(f"`{field}` is not supported. ")


IGNORED: dict[str, Any] = {
    "store": True,
    "service_tier": "flex",
    "safety_identifier": "u",
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
}
"""Fields that agents send and that can be ignored without harm."""


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"use_beam_search": False},
        *({name: value} for name, value in IGNORED.items()),
    ],
)
def test_values_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": "hot"}, "temperature", 'must be a number, got "hot"'),
        ({"temperature": True}, "temperature", "must be a number, got true"),
        ({"n": 0}, "n", "at least 1, got 0"),
        ({"n": 16384}, "n", "at most 128, got 16384"),
        ({"n": 1.5}, "n", "must be an integer, got 1.5"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "must be a list"),
        ({"messages": ["hi"]}, "messages[0]", "must be an object"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", 'got "wizard"'),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
            "messages[0].tool_call_id",
            "before the results",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string or a list"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
            "must be an object",
        ),
        ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages", "at most 2048"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": 5}, "stop", "string or a list"),
        ({"stop": ["a", 5]}, "stop[1]", "must be a string"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "must be an integer"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": [1]}, "logit_bias", "must be an object"),
        ({"top_logprobs": 2}, "top_logprobs", "only allowed with"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"logprobs": 5}, "logprobs", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "may not set"),
        ({"chat_template_kwargs": {"enable_thinking": {"a": 1}}}, "chat_template_kwargs.enable_thinking", "Send text"),
        ({"continue_final_message": True}, "continue_final_message", "role assistant"),
        ({"priority": 2**31}, "priority", "at most 2147483647, got 2147483648"),
        ({"priority": -(2**31) - 1}, "priority", "at least -2147483648, got -2147483649"),
        ({"priority": 1.5}, "priority", "must be an integer, got 1.5"),
        ({"priority": True}, "priority", "must be an integer, got true"),
        ({"priority": "high"}, "priority", 'must be an integer, got "high"'),
        ({"model": 5}, "model", "must be a string"),
        ({"model": ""}, "model", "at least 1"),
        ({"model": "x" * 5000}, "model", "at most 512"),
        ({"user": "x" * 5000}, "user", "at most 1024"),
    ],
)
def test_invalid_chat_fields_are_refused_with_value_and_remedy(fields: dict[str, Any], param: str, says: str) -> None:
    error = refused_chat(**fields)
    assert error.param == param
    assert says in error.message
    assert len(error.message) < 400


def test_priorities_of_32_bits_are_accepted() -> None:
    assert [chat(priority=each).priority for each in (-(2**31), 0, 2**31 - 1)] == [-(2**31), 0, 2**31 - 1]


@pytest.mark.parametrize("field", ["priority", "seed", "n"])
@pytest.mark.parametrize("value", [2**64, -(2**64), 10**300])
def test_an_integer_too_large_for_any_field_is_called_an_integer(field: str, value: int) -> None:
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "%b": %d}' % (field.encode(), value)
    error = refused(raw)
    assert (error.param, error.status) == (field, 400)
    assert "must be an integer of at most 64 bits, got" in error.message


def test_a_missing_field_is_named() -> None:
    error = refused(b'{"model": "m"}')
    assert (error.param, error.code) == ("messages", "missing_required_parameter")
    assert refused(b'{"messages": [{"role": "user", "content": "x"}]}').param == "model"


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "a\nb"
    image = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
    error = refused_chat(messages=[{"role": "user", "content": [*parts, image]}])
    assert error.param == "messages[0].content[2].type"
    assert refused_chat(messages=[{"role": "user", "content": ["x"]}]).param == "messages[0].content[0]"
    error = refused_chat(messages=[{"role": "user", "content": [{"type": "text", "text": 1}]}])
    assert error.param == "messages[0].content[0].text"


def test_an_answer_of_this_server_is_accepted_as_history() -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": [], "audio": None, "annotations": []}
    assert chat(messages=[*CHAT["messages"], answer]).messages[1].for_template() == {
        "role": "assistant",
        "content": "x",
    }


def test_the_developer_role_is_the_system_role_in_the_template() -> None:
    assert chat(messages=[{"role": "developer", "content": "x"}]).messages[0].for_template()["role"] == "system"


def test_the_newer_name_of_the_token_limit_takes_precedence() -> None:
    request = chat(max_tokens=5, max_completion_tokens=7)
    assert (request.requested_tokens, request.max_tokens_field) == (7, "max_completion_tokens")
    assert chat(max_tokens=5).requested_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3]], ["a", [3]]),
    ],
)
def test_prompts_may_have_four_forms(prompt: Any, parsed: list[Any]) -> None:
    assert completion(prompt=prompt).prompt == parsed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", []]}, "prompt[1]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [[1], [2, 2**31]]}, "prompt[1][1]"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 1000, "n": 128}, "n"),
        ({"best_of": 3, "n": 4}, "best_of"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"suffix": "x", "prompt": [1]}, "prompt"),
        ({"suffix": ["x"]}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(129)), "logprobs": 0}, "logprob_token_ids"),
        ({"allowed_token_ids": list(range(65537))}, "allowed_token_ids"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids[0]"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": ["a"] * 257}, "bad_words"),
        ({"return_token_ids": 1}, "return_token_ids"),
    ],
)
def test_invalid_completion_fields_are_named(fields: dict[str, Any], param: str) -> None:
    assert refused_completion(**fields).param == param


def test_best_of_equal_to_n_is_accepted() -> None:
    assert completion(best_of=2, n=2).n == 2


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", None),
        (b"  \n", None),
        (b"[]", None),
        (b"5", None),
        (b"null", None),
        (b"{bad", None),
        (b'{"model": "m"} x', None),
        (b"\xef\xbb\xbf{}", None),
        (b'{"temperature": NaN}', "temperature"),
        (b'{"a": {"top_p": [1, -Infinity]}}', "a.top_p[1]"),
        (b'{"temperature": 1e999}', "temperature"),
        (b'{"max_tokens": 1' + b"0" * 6000 + b"}", "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "content"),
        (b'{"messages": [{"role": "user", "content": "a\\u0000b"}]}', "messages[0].content"),
        (b'{"user": "' + b"\x00" + b'"}', None),
        (b'{"deep": ' + b"[" * 100_000, ("deep" + "[0]" * 99)[:200]),
        (b'{"deep": ' + b'{"a":' * 100_000, ("deep" + ".a" * 99)[:200]),
        (b'{"\\ud800": 1}', "?"),
    ],
)
def test_invalid_json_is_a_400_that_names_the_position(raw: bytes, param: str | None) -> None:
    assert refused(raw).param == param


def test_an_escaped_backslash_is_not_a_nul() -> None:
    assert chat(messages=[{"role": "user", "content": "\\u0000"}]).messages[0].content == "\\u0000"


def test_integers_beyond_64_bits_are_not_integers() -> None:
    raw = orjson.dumps(CHAT)[:-1] + b', "seed": 123456789012345678901234567890}'
    assert refused(raw).param == "seed"


def test_nesting_up_to_the_limit_is_accepted_in_ignored_fields() -> None:
    raw = orjson.dumps(CHAT)[:-1] + b', "x": ' + b"[" * 99 + b"]" * 99 + b"}"
    assert parse_body(raw, ChatCompletionRequest) == chat()


@pytest.mark.parametrize(
    "raw",
    [
        b'{"n": 999999999, "messages": [], "model": "m"}',
        b'{"model": "m", "messages": [' + b"1," * 500_000 + b"1]}",
        b'{"model": "m", "messages": [{"role": "user", "content": [' + b"1," * 500_000 + b"1]}]}",
        b'{"model": "m", "logit_bias": {' + b",".join(b'"%d": "x"' % i for i in range(100_000)) + b"}}",
        b'{"model": "m", "x": [' + b"NaN," * 200_000 + b"1]}",
        b'{"model": "m", "x": [' + b"1," * 1_000_000 + b"NaN]}",
        b'{"model": "m", "prompt": "' + b"\\\\" * 4_000_000 + b'\\u0000"}',
        b'{"model": "m", "x": [' + b"1," * 1_000_000 + b'"\\u0000"]}',
        b'{"model": "m", "' + b"k" * 4_000_000 + b'": [' + b"1," * 1_000_000 + b"NaN]}",
    ],
    ids=["n", "messages", "parts", "bias", "nan", "late nan", "backslashes", "late nul", "long key"],
)
def test_hostile_bodies_are_refused_quickly(raw: bytes) -> None:
    start_s = time.process_time()
    refused(raw)
    assert time.process_time() - start_s < 3.0


def test_tokenize_accepts_a_prompt_or_messages() -> None:
    def tokenize(**fields: Any) -> TokenizeRequest:
        return parse_body(orjson.dumps(fields), TokenizeRequest)

    assert tokenize(prompt="a").add_special_tokens is None
    assert tokenize(messages=CHAT["messages"]).messages is not None
    assert refused(b"{}", TokenizeRequest).param == "prompt"
    assert refused(orjson.dumps({**CHAT, "prompt": "a"}), TokenizeRequest).param == "prompt"
    assert refused(b'{"prompt": "a", "chat_template": "x"}', TokenizeRequest).param == "chat_template"


def test_detokenize_accepts_token_ids() -> None:
    assert parse_body(b'{"tokens": [1, 2]}', DetokenizeRequest).tokens == [1, 2]
    assert refused(b'{"tokens": []}', DetokenizeRequest).param == "tokens"
    assert refused(b'{"tokens": [1, "a"]}', DetokenizeRequest).param == "tokens[1]"
    assert refused(b'{"tokens": "a"}', DetokenizeRequest).param == "tokens"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
field_names = st.sampled_from(
    [*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, "tools", "response_format", "audio", "x"]
)


@settings(max_examples=num_examples(200), deadline=None)
@given(
    st.dictionaries(field_names, json_values, max_size=5), st.sampled_from([ChatCompletionRequest, CompletionRequest])
)
def test_any_json_is_parsed_or_refused_in_the_error_format(fields: dict[str, Any], schema: type[BaseModel]) -> None:
    base = CHAT if schema is ChatCompletionRequest else COMPLETION
    raw = json.dumps({**base, **fields}).encode()
    assert_parsed_or_refused(raw, schema)


@settings(max_examples=num_examples(300), deadline=None)
@given(st.binary(max_size=80))
@example(b'{"a":"\\u0000')
@example(b'"\\udfff\\u0000"')
def test_any_bytes_are_parsed_or_refused_in_the_error_format(raw: bytes) -> None:
    assert_parsed_or_refused(raw, CompletionRequest)


@pytest.mark.parametrize("field", ["max_tokens", "n", "seed", "top_k", "priority"])
def test_an_integer_may_be_written_with_a_fraction_of_zero(field: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    found = parse_body(json.dumps({**body, field: 2.0}).encode(), ChatCompletionRequest)
    assert (getattr(found, field), type(getattr(found, field))) == (2, int)
    with pytest.raises(PagemillError):
        parse_body(json.dumps({**body, field: 2.5}).encode(), ChatCompletionRequest)


def test_a_top_p_of_zero_is_greedy() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "top_p": 0, "temperature": 0.7}
    sampling = sampling_of(parse_body(json.dumps(body).encode(), ChatCompletionRequest))
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)
