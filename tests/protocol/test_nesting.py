"""One limit of nesting for the JSON of all dialects: 100 levels, far below what parsers and renderers take."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_api.answers.json_text import _text
from pagemill_api.dialects.base import FinishedChoice
from pagemill_api.dialects.openai_responses.request import ResponsesRequest
from pagemill_api.dialects.openai_responses.responses import ResponsesDialect
from pagemill_api.dialects.registry import generating_routes
from pagemill_api.dialects.transport import RequestInfo
from pagemill_api.openai import call_parts
from pagemill_api.openai.parse import parse_body, parse_json
from pagemill_api.openai.schemas import ChatCompletionRequest
from pagemill_protocol import nesting
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams

USER = {"role": "user", "content": "hi"}
WHOLE: dict[str, Any] = {"model": "m", "messages": [USER], "prompt": "hi", "input": "hi", "inputs": "hi"}


def nested(levels: int, opening: str = "[", closing: str = "]", inner: str = "") -> str:
    return opening * levels + inner + closing * levels


def with_field(body: dict[str, Any], raw_value: str, name: str = "x") -> bytes:
    return orjson.dumps(body)[:-1] + f', "{name}": {raw_value}}}'.encode()


def parse(raw: bytes, path: str) -> PagemillError | None:
    """Return the error of a body that the dialect refuses."""
    try:
        generating_routes()[path].parse(raw, RequestInfo(path, {"model": "m"}))
    except PagemillError as error:
        return error
    return None


def refused(raw: bytes, path: str = "/v1/chat/completions") -> PagemillError:
    error = parse(raw, path)
    assert error is not None
    assert (error.status, error.code) == (400, "nested_too_deeply"), error.message
    assert "more than 100 levels" in error.message
    assert "Use fewer levels" in error.message
    return error


@pytest.mark.parametrize("path", sorted(generating_routes()))
@pytest.mark.parametrize(("opening", "closing", "levels"), [("[", "]", 1), ('{"a":', "}", 1), ('[{"":', "}]", 2)])
def test_every_dialect_takes_100_levels_and_refuses_more_by_path(
    path: str, opening: str, closing: str, levels: int
) -> None:
    most = 99 // levels
    taken = parse(with_field(WHOLE, nested(most, opening, closing, "1")), path)
    assert taken is None or taken.code != "nested_too_deeply"
    for more in (most + 1, 251, 900, 2000, 100_000):
        error = refused(with_field(WHOLE, nested(more, opening, closing, "1")), path)
        assert (error.param or "").startswith("x"), error.param


@pytest.mark.parametrize("levels", [98, 251, 400, 1100])
def test_the_path_leads_to_the_value_that_is_nested_too_deeply(levels: int) -> None:
    schema = nested(levels, '{"properties":', "}", "1")
    raw = b'{"model":"m","tools":[{},{"name":"f","parameters":%s}],"input":"hi"}' % schema.encode()
    error = refused(raw, "/v1/responses")
    assert (error.param or "").startswith("tools[1].parameters.properties.properties")
    assert len(error.param or "") == 200


def test_brackets_in_texts_are_no_levels() -> None:
    body = {**WHOLE, "prompt": '["{\\' * 1000, "messages": [{**USER, "content": "[" * 100_000}]}
    assert parse_body(orjson.dumps(body), ChatCompletionRequest).messages[0].content == "[" * 100_000


VALUES = st.recursive(
    st.none() | st.text('[]{}"\\,:a', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[{"\\a', max_size=2), inner, max_size=3),
    max_leaves=30,
)


def levels_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(levels_of, value.values() if isinstance(value, dict) else value), default=0)


@given(VALUES, st.integers(1, 8))
def test_levels_are_counted_as_by_the_simplest_recursion(value: Any, limit: int) -> None:
    assert nesting.exceeds(value, limit) == (levels_of(value) > limit)


@pytest.mark.parametrize("levels", [101, 500, 5000])
def test_json_text_of_earlier_calls_is_limited_as_well(levels: int) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": nested(levels, '{"a":[', "]}")}}
    body = {**WHOLE, "messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
    assert refused(orjson.dumps(body)).param == "messages[1].tool_calls[0].function.arguments"
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": nested(levels)}
    refused(orjson.dumps({"model": "m", "input": [item]}), "/v1/responses")


@pytest.mark.parametrize("levels", [101, 300, 2000])
def test_deep_arguments_that_a_model_wrote_are_rendered_as_text(levels: int) -> None:
    arguments = '{"a":' + nested(levels) + "}"
    assert call_parts.arguments_object(arguments) == {"arguments": arguments}
    orjson.dumps(call_parts.arguments_object('{"a":' + nested(99) + "}"))


def test_a_name_that_a_model_nests_without_end_is_no_name() -> None:
    assert _text(nested(100_000)) == ""


def request_with(client_fields: str) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=1)
    return GenerateRequest(
        request_id="r", model="m", prompt_token_ids=[1], sampling=sampling, client_fields=client_fields
    )


def test_whatever_the_responses_api_accepts_can_be_rendered() -> None:
    parameters = json.loads(nested(97, '{"a":', "}", "1"))
    tools = [{"type": "function", "name": "f", "parameters": parameters}]
    given_body = parse_body(orjson.dumps({"model": "m", "input": "hi", "tools": tools}), ResponsesRequest)
    renderer = ResponsesDialect().renderer(request_with(json.dumps(given_body.shown())), None)
    body = orjson.loads(renderer.body([FinishedChoice(0, "hi", "stop")], Usage(1, 1)))
    assert body["tools"][0]["parameters"] == parameters


def test_fields_of_another_gateway_that_cannot_be_rendered_are_refused_before_they_are_generated() -> None:
    with pytest.raises(PagemillError) as caught:
        ResponsesDialect().renderer(request_with('{"tools":' + nested(251) + "}"), None)
    assert (caught.value.status, caught.value.code) == (400, "nested_too_deeply")


def test_a_text_without_many_brackets_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nesting, "exceeds", None)
    assert parse_json(b'{"a":[' + b"[]," * 40 + b"[]]}")
