"""Render answers in Triton's shapes: `text_output` as a field of events and objects, or as a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from pagemill_api.answers.events import Event
from pagemill_api.dialects.base import AnswerRenderer, ChoiceEnd, FinishedChoice, Piece
from pagemill_api.dialects.open_inference.tensors import packed
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.json_pieces import on_one_line
from pagemill_protocol.request.generate import GenerateRequest, Usage

VERSION = "1"
"""The only version of each model."""


class GenerateRenderer(AnswerRenderer):
    def __init__(self, request: GenerateRequest) -> None:
        self._asked: dict[str, Any] = orjson.loads(request.client_fields or b"{}")
        given = {"id": self._asked["id"]} if self._asked.get("id") else {}
        self._head = {**given, "model_name": request.model, "model_version": VERSION}

    def resume(self, choice: int, events: Sequence[Event], end: ChoiceEnd | None) -> None:
        """No state is needed: every event is self-contained."""

    def chunk(self, piece: Piece) -> bytes:
        if not piece.text and not piece.is_first:
            return b""
        return _event({**self._head, "text_output": piece.text})

    def end(self, usage: Usage) -> bytes:
        return b""

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        return orjson.dumps({**self._head, "text_output": self._text(choices)})

    def _text(self, choices: Sequence[FinishedChoice]) -> str:
        (choice,) = choices
        return str(self._asked.get("before", "")) + choice.text


class InferRenderer(GenerateRenderer):
    """Renders tensors. A line break separates the JSON, which contains none, from the bytes after it."""

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        text = self._text(choices)
        raw = packed(text) if self._asked.get("binary") else b""
        data = {"parameters": {"binary_data_size": len(raw)}} if raw else {"data": [text]}
        output = {"name": "text_output", "datatype": "BYTES", "shape": self._asked.get("shape", [1]), **data}
        body = orjson.dumps({**self._head, "outputs": [output]})
        return body + b"\n" + raw if raw else body


def body_headers(body: bytes) -> Mapping[str, str]:
    """Return the headers for a body of `InferRenderer`."""
    length = body.find(b"\n") + 1
    if not length:
        return {"content-type": "application/json"}
    return {"content-type": "application/octet-stream", "inference-header-content-length": str(length)}


def error_body(error: PagemillError) -> bytes:
    return orjson.dumps({"error": error.message})


def error_event(error: PagemillError) -> bytes:
    return b"data: " + on_one_line(error_body(error)) + b"\n\n"


def _event(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + on_one_line(orjson.dumps(fields)) + b"\n\n"
