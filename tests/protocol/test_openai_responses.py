"""OpenAI's Responses API: the chat that a body is translated to, and the items and events of answers."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal_of

from pagemill_api.answers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from pagemill_api.dialects.base import FinishedChoice, Piece
from pagemill_api.dialects.openai_responses.request import ResponsesRequest
from pagemill_api.dialects.openai_responses.responses import ResponsesDialect
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.schemas import ChatCompletionRequest
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import FinishReason, GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams

DIALECT = ResponsesDialect()
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
EVENTS = st.lists(
    st.one_of(
        st.builds(Content, st.text(min_size=1, max_size=3)),
        st.builds(Reasoning, st.text(min_size=1, max_size=3)),
        st.lists(st.text(min_size=1, max_size=3), max_size=3),
    ),
    max_size=6,
)


def parse(**fields: Any) -> ChatCompletionRequest:
    return DIALECT.parse(json.dumps({"model": "m", "input": "hi", **fields}).encode()).fields


refused = partial(refusal_of, parse)


def request() -> GenerateRequest:
    return GenerateRequest(
        request_id="resp_1",
        model="m",
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(),
        dialect="responses",
        client_fields='{"tools": [], "parallel_tool_calls": true}',
    )


def events_of(raw: bytes) -> list[dict[str, Any]]:
    found = []
    for event in raw.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def streamed(events: list[Event], finish_reason: FinishReason = "stop") -> list[dict[str, Any]]:
    renderer = DIALECT.renderer(request(), None)
    raw = b""
    for at, event in enumerate([*events, None]):
        ends = event is None
        found = [] if event is None else [event]
        piece = Piece(0, "", at == 0, finish_reason if ends else None, None, None, found)
        raw += renderer.chunk(piece)
    return events_of(raw + renderer.end(Usage(3, 5, 1)))


def whole(events: list[Event], finish_reason: FinishReason = "stop") -> dict[str, Any]:
    choice = FinishedChoice(0, "", finish_reason, None, events)
    body: dict[str, Any] = json.loads(DIALECT.renderer(request(), None).body([choice], Usage(3, 5, 1)))
    return body


def numbered(drawn: list[Any]) -> list[Event]:
    """Return numbered events; a list stands for a call with these pieces of arguments."""
    events: list[Event] = []
    num_calls = 0
    for each in drawn:
        if isinstance(each, list):
            events += [CallBegin("f", num_calls), *(CallArguments(piece, num_calls) for piece in each), CallEnd()]
            num_calls += 1
        else:
            events.append(each)
    return events


def test_settings_are_translated_to_chat_fields() -> None:
    fields = parse(
        instructions="Be brief.",
        max_output_tokens=9,
        temperature=0.5,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
        store=True,
        include=["reasoning.encrypted_content"],
    )
    assert [(each.role, each.content) for each in fields.messages] == [("developer", "Be brief."), ("user", "hi")]
    assert (fields.requested_tokens, fields.temperature, fields.reasoning_effort) == (9, 0.5, "low")
    assert fields.form is not None


def test_items_become_messages_calls_and_outputs() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "rain?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "yes"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
        },
    ]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    fields = parse(input=items, tools=[TOOL], tool_choice=allowed)
    roles = [each.role for each in fields.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]
    calling = fields.messages[1]
    assert [call["id"] for call in calling.tool_calls] == ["c1", "c2"]
    assert calling.reasoning_content == "hm"
    assert [each.content for each in fields.messages[2:]] == ["yes", "no", "Yes."]
    assert fields.tools[0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "shell"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "not a name"}]}, "tools[0].name"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"truncation": "some"}, "truncation"),
    ],
)
def test_an_invalid_value_is_named_by_its_path(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_limits_are_named_by_the_clients_field() -> None:
    body = DIALECT.parse(b'{"model": "m", "input": "hi", "max_output_tokens": 0}')
    with pytest.raises(PagemillError) as caught:
        body.sampling()
    assert caught.value.param == "max_output_tokens"


@given(EVENTS, st.sampled_from(["stop", "length"]))
def test_the_items_of_a_stream_equal_those_of_the_body(drawn: list[Any], finish_reason: FinishReason) -> None:
    events = numbered(drawn)
    shown = streamed(events, finish_reason)
    assert [each["type"] for each in shown[:2]] == ["response.created", "response.in_progress"]
    numbers = [each["sequence_number"] for each in shown]
    assert numbers == [*range(len(shown))]
    last = shown[-1]["response"]
    done = [each["item"] for each in shown if each["type"] == "response.output_item.done"]
    assert last["output"] == done
    texts: dict[str, str] = {}
    for each in shown:
        if each["type"].endswith(".delta"):
            texts[each["item_id"]] = texts.get(each["item_id"], "") + each["delta"]
    for item in done:
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert text == texts.get(item["id"], "")
    answer = whole(events, finish_reason)
    assert {**answer, "completed_at": 0} == {**last, "completed_at": 0}
    assert shown[-1]["type"] == f"response.{answer['status']}"
    assert answer["status"] == ("incomplete" if finish_reason == "length" else "completed")


def test_a_failure_within_a_stream_is_a_failed_response_with_what_it_has_so_far() -> None:
    renderer = DIALECT.renderer(request(), None)
    renderer.chunk(Piece(0, "ab", True, None, None, None, [Content("ab")]))
    before = renderer.num_events
    *_, last = events_of(renderer.failure(PagemillError("The engine died.", status=502, code="bad_upstream")))
    response = last["response"]
    assert (last["type"], response["status"], response["usage"]) == ("response.failed", "failed", None)
    assert response["error"] == {"code": "bad_upstream", "message": "The engine died."}
    assert (response["output"][0]["status"], response["output"][0]["content"][0]["text"]) == ("incomplete", "ab")
    assert last["sequence_number"] >= before
    unbegun = DIALECT.renderer(request(), None)
    (only,) = events_of(unbegun.failure(PagemillError("No engine.", status=503)))
    assert (only["type"], only["sequence_number"]) == ("error", 0)


def test_usage_has_the_field_names_of_the_api() -> None:
    assert whole([Content("a")])["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 8,
    }


REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier"),
    "prompt_cache_key",
}
"""Fields that the Open Responses specification requires in every response."""
PLACED = {"type", "sequence_number", "output_index"}
IN_ITEM = PLACED | {"item_id"}
IN_PART = IN_ITEM | {"content_index"}
EVENT_FIELDS = {
    "response.created": {"type", "sequence_number", "response"},
    "response.in_progress": {"type", "sequence_number", "response"},
    "response.completed": {"type", "sequence_number", "response"},
    "response.incomplete": {"type", "sequence_number", "response"},
    "response.output_item.added": PLACED | {"item"},
    "response.output_item.done": PLACED | {"item"},
    "response.content_part.added": IN_PART | {"part"},
    "response.content_part.done": IN_PART | {"part"},
    "response.output_text.delta": IN_PART | {"delta", "logprobs"},
    "response.output_text.done": IN_PART | {"text", "logprobs"},
    "response.reasoning_text.delta": IN_PART | {"delta"},
    "response.reasoning_text.done": IN_PART | {"text"},
    "response.function_call_arguments.delta": IN_ITEM | {"delta"},
    "response.function_call_arguments.done": IN_ITEM | {"arguments"},
}
"""Fields that the Open Responses specification requires in each event."""
ITEM_FIELDS = {
    "message": {"id", "type", "status", "role", "content"},
    "reasoning": {"id", "type", "summary"},
    "function_call": {"id", "type", "call_id", "name", "arguments", "status"},
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL], "text": {"verbosity": "low"}, "reasoning": {"effort": "low"}, "user": "u"},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
    ],
)
def test_responses_and_events_have_the_fields_that_open_responses_requires(fields: dict[str, Any]) -> None:
    body = parse_body(json.dumps({"model": "m", "input": "hi", **fields}).encode(), ResponsesRequest)
    given = msgspec.structs.replace(request(), client_fields=json.dumps(body.shown()))
    events = numbered([Reasoning("r"), Content("t"), ["{}"]])
    renderer = DIALECT.renderer(given, None)
    raw = renderer.chunk(Piece(0, "", True, "stop", None, None, events)) + renderer.end(Usage(3, 5, 1))
    for event in events_of(raw):
        assert event.keys() >= EVENT_FIELDS[event["type"]], event
        if "item" in event:
            assert event["item"].keys() >= ITEM_FIELDS[event["item"]["type"]], event
        if event.get("part", {}).get("type") == "output_text":
            assert event["part"].keys() >= {"type", "text", "annotations", "logprobs"}
        if "response" in event:
            response = event["response"]
            assert response.keys() >= REQUIRED, REQUIRED - response.keys()
            assert response["text"]["format"]["type"] in ("text", "json_schema")
            assert response["reasoning"] is None or response["reasoning"].keys() >= {"effort", "summary"}
            assert response["background"] is False
            assert isinstance(response["presence_penalty"], float)
            for tool in response["tools"]:
                assert tool.keys() >= {"type", "name", "description", "parameters", "strict"}
    assert (response["status"], response["completed_at"] >= response["created_at"]) == ("completed", True)
