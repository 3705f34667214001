"""Render answers in the shapes of Anthropic's Messages API: content blocks, named events, errors.

A stream numbers its blocks in the order in which they begin, so the renderer counts them; where another engine began
the stream, the renderer first receives the events that were delivered. Ids of tool uses equal those of the chat
dialect's calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from pagemill_api.answers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning, calls_are_complete
from pagemill_api.dialects.base import AnswerRenderer, ChoiceEnd, FinishedChoice, Piece
from pagemill_api.openai import call_parts
from pagemill_api.openai.call_ids import CallIds
from pagemill_api.openai.render import head
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.json_pieces import on_one_line
from pagemill_protocol.request.generate import FinishReason, GenerateRequest, Usage

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
DETAILS: Mapping[str | None, Mapping[str, Any]] = {"thread": {"error_code": "thread_unsupported_request"}}
"""What clients look for in the error of a field: they repeat the request without it."""


class MessagesRenderer(AnswerRenderer):
    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._id = head(request).id
        self._open: str | None = None
        """Type of the block that has not ended yet."""
        self._num_blocks = 0
        self._has_calls = False
        """Whether the answer has calls, and all of them are complete."""
        self._finish_reason: FinishReason | None = None
        self._stopped_by: str | int | None = None

    def resume(self, choice: int, events: Sequence[Event], end: ChoiceEnd | None) -> None:
        for _ in self._rendered(events):
            pass
        if end is not None:
            self._finish_reason, self._stopped_by = end

    def chunk(self, piece: Piece) -> bytes:
        events = piece.events if piece.events is not None else [Content(piece.text)] if piece.text else []
        if piece.finish_reason is not None:
            self._finish_reason, self._stopped_by = piece.finish_reason, piece.stop_reason
        start = self._start() if piece.is_first else b""
        return start + b"".join(self._rendered(events))

    def end(self, usage: Usage) -> bytes:
        ended = b"" if self._open == "tool_use" else self._end_block()  # a call that is open at the end is incomplete
        last = _event("message_delta", delta=self._stop(), usage=_usage(usage), **self._context_management())
        return ended + last + _event("message_stop")

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        (choice,) = choices
        self._finish_reason, self._stopped_by = choice.finish_reason, choice.stop_reason
        events = choice.events if choice.events is not None else [Content(choice.text)] if choice.text else []
        content = _blocks(events, self._id)
        self._has_calls = calls_are_complete(events)
        return orjson.dumps(
            {
                **self._message(),
                "content": content,
                **self._stop(),
                "usage": _usage(usage),
                **self._context_management(),
            }
        )

    def _context_management(self) -> dict[str, Any]:
        """Return the report on the edits of the context, if the client asked for any."""
        fields = self._request.client_fields
        return {"context_management": orjson.loads(fields)} if fields else {}

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _start(self) -> bytes:
        usage = _usage(Usage(len(self._request.prompt_token_ids)))
        return _event("message_start", message={**self._message(), "usage": usage})

    def _rendered(self, events: Sequence[Event]) -> Iterator[bytes]:
        for event in events:
            match event:
                case Content(text):
                    yield self._in_block("text", {"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case Reasoning(text):
                    yield self._in_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                    yield self._delta({"type": "thinking_delta", "thinking": text})
                case CallBegin(name, index):
                    self._has_calls = False
                    yield self._end_block()
                    yield self._in_block("tool_use", _tool_use(self._id, index, name, {}))
                case CallArguments(text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case CallEnd():
                    self._has_calls = True
                    yield self._end_block()

    def _in_block(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        ended = self._end_block()
        self._open = kind
        self._num_blocks += 1
        return ended + _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _end_block(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._num_blocks - 1)

    def _stop(self) -> dict[str, str | None]:
        if self._finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(self._stopped_by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stopped_by}
        return {"stop_reason": "tool_use" if self._has_calls else "end_turn", "stop_sequence": None}


def error_body(error: PagemillError) -> bytes:
    return orjson.dumps(_error(error))


def error_event(error: PagemillError) -> bytes:
    return _event(**_error(error))


def _error(error: PagemillError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"details": DETAILS[error.param]} if error.param in DETAILS else {}
    return {"type": "error", "error": {**error.body()["error"], "type": kind, **details}}


def _blocks(events: Sequence[Event], response_id: str) -> list[dict[str, Any]]:
    """Return the content blocks of a complete answer, in the order of the text."""
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, list[str]] = {}
    incomplete: int | None = None
    for event in events:
        last = blocks[-1] if blocks else {}
        match event:
            case Content(text) if last.get("type") == "text":
                last["text"] += text
            case Content(text):
                blocks.append({"type": "text", "text": text})
            case Reasoning(text) if last.get("type") == "thinking":
                last["thinking"] += text
            case Reasoning(text):
                blocks.append({"type": "thinking", "thinking": text, "signature": ""})
            case CallBegin(name, index):
                incomplete = len(blocks)
                arguments[incomplete] = []
                blocks.append(_tool_use(response_id, index, name, {}))
            case CallArguments(text):
                arguments[max(arguments)].append(text)
            case CallEnd():
                incomplete = None
    for place, pieces in arguments.items():
        read = call_parts.partial_object if place == incomplete else call_parts.arguments_object
        blocks[place]["input"] = read("".join(pieces))
    return blocks


def _tool_use(response_id: str, index: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": CallIds(response_id).of(0, index, prefix="toolu"),
        "name": name,
        "input": arguments,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    thinking = {} if usage.reasoning_tokens is None else {"thinking_tokens": usage.reasoning_tokens}
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **({"output_tokens_details": thinking} if thinking else {}),
    }


def _event(type: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (type.encode(), on_one_line(orjson.dumps({"type": type, **fields})))
