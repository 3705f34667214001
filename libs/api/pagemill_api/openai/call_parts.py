"""Render events of an answer in the shapes of OpenAI's chat: deltas of a stream, and the message of a whole answer.

Ids of calls (`call_ids`) follow from the response's id and the call's position, so an engine that continues a stream
makes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from pagemill_api.answers.cut_json import cut_object
from pagemill_api.answers.events import CallArguments, CallBegin, Content, Event, Reasoning
from pagemill_api.openai.call_ids import CallIds
from pagemill_api.openai.render import ToolReason
from pagemill_protocol import nesting
from pagemill_protocol.request.generate import FinishReason


def delta(event: Event, ids: CallIds, choice: int) -> dict[str, Any] | None:
    """Return the delta of one event; None for the end of a call."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case CallBegin(name, index):
            return {"tool_calls": [{"index": index, **_call(ids, choice, index, name, "")}]}
        case CallArguments(text, index):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return None


def message(events: Sequence[Event], ids: CallIds, choice: int) -> dict[str, Any]:
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, CallArguments):
            arguments.setdefault(event.call, []).append(event.text)
    calls = [
        _call(ids, choice, event.call, event.name, "".join(arguments.get(event.call, ())))
        for event in events
        if isinstance(event, CallBegin)
    ]
    rendered: dict[str, Any] = {"content": content or (None if calls or reasoning else "")}
    if reasoning:
        rendered |= _reasoning(reasoning)
    if calls:
        rendered["tool_calls"] = calls
    return rendered


def finish_reason(reason: FinishReason | None, has_calls: bool, *, named: bool) -> FinishReason | ToolReason | None:
    """Return the finish reason.

    `has_calls`: the answer has calls, and all are complete. `named`: the client named the function to call.
    """
    return "tool_calls" if reason == "stop" and has_calls and not named else reason


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return arguments as an object.

    Text that is not a JSON object, or one too deep for clients and renderers, is returned under one key.
    """
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) and not nesting.exceeds(value) else {"arguments": arguments}


def partial_object(arguments: str) -> dict[str, Any]:
    """Return the complete values of arguments that were cut, as clients read them from a stream that ends there."""
    found = cut_object(arguments)
    return arguments_object(arguments) if found is None else found


def _reasoning(text: str) -> dict[str, Any]:
    """Return reasoning under both names that clients use."""
    return {"reasoning_content": text, "reasoning": text}


def _call(ids: CallIds, choice: int, index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": ids.of(choice, index), "type": "function", "function": function}
