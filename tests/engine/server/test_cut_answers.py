"""A call that is cut has the finish reason of the cut, no event that closes it, and no text: in every dialect, streamed
and plain. An empty answer has one form in each dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jiter import from_json

from examples import num_examples
from pagemill_api.openai.call_parts import partial_object
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.ipc.messages import TokensOut
from pagemill_engine.output.processor import OutputProcessor
from pagemill_protocol.request.answer_format import AnswerFormat
from pagemill_protocol.request.generate import FinishReason, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

CUT = '<tool_call>{"name": "f", "arguments": {"list": [1, {"a": "b"}, 2], "city": "Rome'
NAMELESS = '<tool_call>\n{"name": "get_'
WHOLE = CUT + '"}}</tool_call>'
ENDS: list[tuple[FinishReason, list[str]]] = [("length", []), ("stop", []), ("stop", ["END"])]
"""By a limit, by an end token, by a stop string."""
REASONS = {
    "chat": ["length", "stop", "stop"],
    "messages": ["max_tokens", "end_turn", "stop_sequence"],
    "responses": ["incomplete", "incomplete", "incomplete"],
    "ollama-chat": ["length", "stop", "stop"],
}
CASES = [(dialect, *end, REASONS[dialect][at]) for dialect in REASONS for at, end in enumerate(ENDS)]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def answered(
    tokenizer: Tokenizer,
    dialect: str,
    text: str,
    finish: FinishReason,
    stop: list[str],
    *,
    stream: bool,
    tools: bool = True,
) -> bytes:
    """Return the bytes of an answer whose last token ends it, unless one of `stop` does."""
    request = GenerateRequest(
        request_id="r",
        model="m",
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=None, stop=stop),
        dialect=dialect,
        stream=stream,
        answer_format=AnswerFormat(tools="hermes") if tools else None,
    )
    processor = OutputProcessor(request, tokenizer)
    token_ids = [*tokenizer.encode(text + "".join(stop)), *tokenizer.eos_token_ids]
    outs = [TokensOut(request_id="r", token_ids=[each]) for each in token_ids[: -1 if finish == "stop" else -2]]
    outs.append(TokensOut(request_id="r", token_ids=token_ids[len(outs) :][:1], finish_reason=finish))
    frames = [frame for out in outs for frame in processor.push(out).frames]
    return b"".join(piece for frame in frames for piece in (frame.payload, *frame.rest))


def data_of(raw: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n") if line and not line.startswith("event:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def message_of(dialect: str, raw: bytes) -> tuple[str, Any]:
    """Return finish reason and content of a streamed answer, as clients put it together."""
    events = data_of(raw)
    if dialect == "messages":
        return _put_together(events)
    if dialect == "responses":
        return shown(dialect, events[-1]["response"])
    if dialect == "ollama-chat":
        calls = [call for event in events for call in event["message"].get("tool_calls", ())]
        content = "".join(event["message"]["content"] for event in events)
        return events[-1]["done_reason"], {"content": content, "calls": calls}
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    content = "".join(delta.get("content") or "" for delta in deltas)
    arguments = "".join(call["function"]["arguments"] for call in calls)
    return events[-1]["choices"][0]["finish_reason"], {"content": content, "calls": [arguments] if calls else []}


def _put_together(events: list[Any]) -> tuple[str, Any]:
    """Return a streamed message as Anthropic's client does, which reads incomplete JSON with jiter."""
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "input": ""})
        elif event["type"] == "content_block_delta":
            blocks[event["index"]]["input"] += event["delta"]["partial_json"]
    found = [{**each, "input": from_json(each["input"].encode(), partial_mode=True)} for each in blocks]
    return events[-2]["delta"]["stop_reason"], [{key: each[key] for key in ("type", "name", "input")} for each in found]


def shown(dialect: str, body: Any) -> tuple[str, Any]:
    """Return finish reason and content of a plain answer."""
    if dialect == "messages":
        keys = ("type", "text", "name", "input")
        blocks = [{key: block[key] for key in keys if key in block} for block in body["content"]]
        return body["stop_reason"], blocks
    if dialect == "responses":
        keys = ("type", "status", "name", "arguments", "content")
        return body["status"], [{key: item[key] for key in keys if key in item} for item in body["output"]]
    if dialect == "ollama-chat":
        return body["done_reason"], {
            "content": body["message"]["content"],
            "calls": body["message"].get("tool_calls", []),
        }
    (choice,) = body["choices"]
    calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
    return choice["finish_reason"], {"content": choice["message"]["content"] or "", "calls": calls}


@pytest.mark.parametrize(("dialect", "finish", "stop", "reason"), CASES)
def test_a_call_that_is_cut_has_the_reason_of_the_cut(
    byte_tokenizer: Tokenizer, dialect: str, finish: FinishReason, stop: list[str], reason: str
) -> None:
    plain, stream = (answered(byte_tokenizer, dialect, CUT, finish, stop, stream=each) for each in (False, True))
    assert shown(dialect, json.loads(plain)) == message_of(dialect, stream)
    assert message_of(dialect, stream)[0] == reason
    kinds = {event.get("type") for event in data_of(stream)}
    assert not kinds & {"content_block_stop", "response.function_call_arguments.done", "response.output_item.done"}
    complete = shown(dialect, json.loads(answered(byte_tokenizer, dialect, WHOLE, "stop", [], stream=False)))[0]
    assert complete == {"chat": "tool_calls", "messages": "tool_use", "responses": "completed"}.get(dialect, "stop")


@pytest.mark.parametrize(("dialect", "finish", "stop", "reason"), CASES)
def test_a_call_that_is_cut_before_its_name_ends_is_no_text(
    byte_tokenizer: Tokenizer, dialect: str, finish: FinishReason, stop: list[str], reason: str
) -> None:
    for stream in (False, True):
        raw = answered(byte_tokenizer, dialect, NAMELESS, finish, stop, stream=stream)
        assert b"get_" not in raw
        assert b"tool_call>" not in raw


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("finish", ["length", "stop"])
@pytest.mark.parametrize("dialect", REASONS)
def test_an_empty_answer_is_equal_streamed_and_plain(
    byte_tokenizer: Tokenizer, dialect: str, finish: FinishReason, tools: bool
) -> None:
    stop = ["a"] if finish == "length" else []  # the limit and the stop string meet in the only token
    plain, stream = (
        answered(byte_tokenizer, dialect, "", "stop", stop, stream=each, tools=tools) for each in (False, True)
    )
    assert shown(dialect, json.loads(plain)) == message_of(dialect, stream)
    content = shown(dialect, json.loads(plain))[1]
    assert content in ([], {"content": "", "calls": []})


@settings(max_examples=num_examples(500))
@given(st.dictionaries(st.text(max_size=3), VALUES, min_size=1), st.data())
def test_cut_arguments_have_the_values_of_a_stream(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    cut = text[: data.draw(st.integers(1, len(text)))]
    assert partial_object(cut) == from_json(cut.encode("utf-8", "surrogatepass"), partial_mode=True)
