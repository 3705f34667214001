"""Render answers in Ollama's shapes: lines of JSON, the last with counts and durations. Calls are sent when
complete."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson

from pagemill_api.answers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from pagemill_api.dialects.base import AnswerRenderer, ChoiceEnd, FinishedChoice, Piece
from pagemill_api.openai import call_parts
from pagemill_api.openai.call_ids import CallIds
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.json_pieces import on_one_line
from pagemill_protocol.request.generate import FinishReason, GenerateRequest, Usage


class LinePart(NamedTuple):
    """The part of an answer that some events add."""

    content: str
    thinking: str
    calls: list[dict[str, Any]]

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls)


class OllamaRenderer(AnswerRenderer):
    def __init__(self, request: GenerateRequest, *, is_chat: bool) -> None:
        created_at = datetime.fromtimestamp(request.created_unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._head = {"model": request.client_fields or request.model, "created_at": created_at}
        self._is_chat = is_chat
        self._ids = CallIds.of_request(request)
        self._begin_s = time.monotonic()
        self._first_token_s = 0.0
        self._call: tuple[int, str, list[str]] | None = None
        """Index, name and arguments of the call that has not ended."""
        self._reason: FinishReason = "stop"

    def resume(self, choice: int, events: Sequence[Event], end: ChoiceEnd | None) -> None:
        self._read(events)
        if end is not None:
            self._reason = end.finish_reason

    def chunk(self, piece: Piece) -> bytes:
        self._first_token_s = self._first_token_s or time.monotonic() - self._begin_s
        self._reason = piece.finish_reason or self._reason
        part = self._read([Content(piece.text)] if piece.events is None else piece.events)
        return self._line(part, done=False) if part else b""

    def end(self, usage: Usage) -> bytes:
        return self._line(LinePart("", "", []), done=True, **self._end(usage, self._first_token_s))

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        (choice,) = choices
        self._reason = choice.finish_reason
        part = self._read([Content(choice.text)] if choice.events is None else choice.events)
        return self._line(part, done=True, **self._end(usage, choice.first_token_s))

    def _read(self, events: Iterable[Event]) -> LinePart:
        content: list[str] = []
        thinking: list[str] = []
        calls: list[dict[str, Any]] = []
        for event in events:
            match event:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    thinking.append(text)
                case CallBegin(name, index):
                    self._call = (index, name, [])
                case CallArguments(text) if self._call is not None:
                    self._call[2].append(text)
                case CallEnd() if self._call is not None:
                    calls.append(self._shown(*self._call))
                    self._call = None
        return LinePart("".join(content), "".join(thinking), calls)

    def _shown(self, index: int, name: str, arguments: Sequence[str]) -> dict[str, Any]:
        function = {"index": index, "name": name, "arguments": call_parts.arguments_object("".join(arguments))}
        return {"id": self._ids.of(0, index), "function": function}

    def _line(self, part: LinePart, *, done: bool, **fields: Any) -> bytes:
        shown: dict[str, Any] = {"content" if self._is_chat else "response": part.content}
        if part.thinking:
            shown["thinking"] = part.thinking
        if part.calls:
            shown["tool_calls"] = part.calls
        answer = {"message": {"role": "assistant", **shown}} if self._is_chat else shown
        return on_one_line(orjson.dumps({**self._head, **answer, "done": done, **fields})) + b"\n"

    def _end(self, usage: Usage, first_token_s: float) -> dict[str, Any]:
        """Return the fields of the last line. Durations are in nanoseconds, from the request's arrival in the
        engine."""
        total_s = time.monotonic() - self._begin_s
        return {
            "done_reason": self._reason,
            "total_duration": int(total_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(first_token_s * 1e9),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(max(0.0, total_s - first_token_s) * 1e9),
        }


def error_body(error: PagemillError) -> bytes:
    return orjson.dumps({"error": error.message})


def error_event(error: PagemillError) -> bytes:
    return on_one_line(error_body(error)) + b"\n"
