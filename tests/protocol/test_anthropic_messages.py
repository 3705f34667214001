"""Anthropic's Messages API: the chat that a body is translated to, and the events and blocks of answers."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal_of

from pagemill_api.answers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from pagemill_api.dialects.anthropic.messages import MessagesDialect
from pagemill_api.dialects.base import ChoiceEnd, FinishedChoice, Piece
from pagemill_api.openai.schemas import ChatCompletionRequest
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import FinishReason, GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams

DIALECT = MessagesDialect()
HI: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"name": "weather", "description": "now", "input_schema": {"type": "object"}}
EVENTS = st.lists(
    st.one_of(
        st.builds(Content, st.text(min_size=1, max_size=3)),
        st.builds(Reasoning, st.text(min_size=1, max_size=3)),
        st.lists(st.text(max_size=3), max_size=3),
    ),
    max_size=6,
)


def parse(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [HI], **fields}
    return DIALECT.parse(json.dumps(body).encode()).fields


refused = partial(refusal_of, parse)


def request() -> GenerateRequest:
    return GenerateRequest(
        request_id="msg_1", model="m", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(), dialect="messages"
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
            pieces = [CallArguments(json.dumps({"a": "".join(each)}), num_calls)] if each else []
            events += [CallBegin("f", num_calls), *pieces, CallEnd()]
            num_calls += 1
        else:
            events.append(each)
    return events


def test_settings_are_translated_to_chat_fields() -> None:
    fields = parse(
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief.", "cache_control": {}}],
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        metadata={"user_id": "u"},
        thinking={"type": "disabled", "display": "omitted"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        stream=True,
    )
    assert fields.form is not None
    assert (fields.reasoning_effort, fields.include_reasoning) == ("low", False)
    assert [(each.role, each.content) for each in fields.messages] == [("system", "Be\nbrief."), ("user", "hi")]
    assert (fields.max_tokens, fields.stop, fields.user, fields.stream) == (9, ["END"], "u", True)
    assert (fields.temperature, fields.top_p, fields.top_k) == (0.5, 0.9, 4)
    assert fields.template_kwargs == {"reasoning_effort": "low", "enable_thinking": False, "thinking": False}


def test_tool_uses_and_their_results_become_calls_and_tool_messages() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}}
    history = [
        HI,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, use]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    fields = parse(messages=history, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    _, assistant, result, question = fields.messages
    assert assistant.reasoning_content == "hm"
    (call,) = assistant.tool_calls
    assert (call["id"], json.loads(call["function"]["arguments"])) == ("t1", {"city": "Köln"})
    assert (result.role, result.tool_call_id, result.content) == ("tool", "t1", "rain")
    assert (question.role, question.content) == ("user", "and now?")
    assert fields.tools[0]["function"] == {"name": "weather", "description": "now", "parameters": {"type": "object"}}
    assert not fields.parallel_tool_calls


def test_a_final_assistant_message_is_continued() -> None:
    fields = parse(messages=[HI, {"role": "assistant", "content": "The answer is"}])
    assert fields.continue_final_message
    assert not fields.add_generation_prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [HI, {"role": "user", "content": [{"type": "image"}]}]}, "messages[1].content[0].type"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].name"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "not a name"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_an_invalid_value_is_named_by_its_path(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert json.loads(DIALECT.error_body(error))["error"]["type"] == "invalid_request_error"


def test_a_tool_result_without_its_use_is_refused() -> None:
    orphan = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t9", "content": "x"}]}
    assert "t9" in refused(messages=[orphan]).message


def test_a_stream_has_a_start_an_end_and_usage() -> None:
    start, *blocks, delta, stop = streamed([Content("a"), Content("b")])
    assert start["message"]["id"] == "msg_1"
    assert start["message"]["usage"]["input_tokens"] == 3
    assert [each["type"] for each in blocks] == [
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
    ]
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": 5,
    }
    assert stop["type"] == "message_stop"


@given(EVENTS)
def test_the_blocks_of_a_stream_equal_those_of_the_body(drawn: list[Any]) -> None:
    events = numbered(drawn)
    shown = streamed(events)
    blocks: list[dict[str, Any]] = []
    pieces: list[str] = []
    is_open = False
    for each in shown:
        match each["type"]:
            case "content_block_start":
                assert not is_open
                assert each["index"] == len(blocks)
                is_open = True
                blocks.append(each["content_block"])
                pieces = []
            case "content_block_delta":
                assert is_open
                delta = each["delta"]
                name = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
                if name is None:
                    pieces.append(delta["partial_json"])
                else:
                    blocks[-1][name] += delta[name]
            case "content_block_stop":
                assert is_open
                is_open = False
                if pieces:
                    blocks[-1]["input"] = json.loads("".join(pieces))
    assert not is_open
    answer = whole(events)
    assert answer["content"] == blocks
    has_calls = any(block["type"] == "tool_use" for block in blocks)
    assert answer["stop_reason"] == ("tool_use" if has_calls else "end_turn")
    assert answer["stop_reason"] == shown[-2]["delta"]["stop_reason"]


def test_an_answer_ended_by_a_stop_sequence_names_it() -> None:
    choice = FinishedChoice(0, "a", "stop", None, stop_reason="END")
    body = json.loads(DIALECT.renderer(request(), None).body([choice], Usage(3, 5)))
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")
    renderer = DIALECT.renderer(request(), None)
    renderer.resume(0, [Content("a")], ChoiceEnd("stop", "END"))
    *_, delta, _ = events_of(renderer.end(Usage(3, 5)))
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_an_answer_ended_by_the_limit_has_stop_reason_max_tokens() -> None:
    assert whole([Content("a")], "length")["stop_reason"] == "max_tokens"
    assert streamed([Content("a")], "length")[-2]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "authentication_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        (503, "overloaded_error"),
        (500, "api_error"),
        (408, "invalid_request_error"),
    ],
)
def test_errors_have_anthropics_format(status: int, kind: str) -> None:
    error = PagemillError("why", status=status)
    body = json.loads(DIALECT.error_body(error))
    assert body == {"type": "error", "error": {"type": kind, "message": "why", "param": None, "code": None}}
    assert events_of(DIALECT.error_event(error)) == [body]


def test_a_schema_that_cannot_be_compiled_is_named_by_anthropics_field() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": 7}}}
    body = {"model": "m", "max_tokens": 9, "messages": [HI], "output_config": form}
    with pytest.raises(PagemillError) as caught:
        DIALECT.parse(json.dumps(body).encode()).check_form()
    assert caught.value.param == "output_config.format"
