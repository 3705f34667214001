"""Render answers in the shapes of OpenAI's Responses API: output items, named events.

The last event contains the whole answer, so a renderer stores it; where another engine began the stream, the renderer
first receives the events that were delivered. Sequence numbers advance by one per event and one per further character
of text, so that they grow and do not depend on how the text was split.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from pagemill_api.answers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from pagemill_api.dialects.base import ChoiceEnd, FinishedChoice, Piece
from pagemill_api.openai.call_ids import CallIds
from pagemill_api.openai.render import head
from pagemill_protocol import nesting
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.json_pieces import on_one_line
from pagemill_protocol.request.generate import FinishReason, GenerateRequest, Usage

Item = dict[str, Any]


class ResponsesRenderer:
    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._id = head(request).id
        self._call_ids = CallIds.of_request(request)
        self._item_ids = CallIds(self._id)
        self._shown: dict[str, Any] = orjson.loads(request.client_fields or "{}")
        # Gateways of other versions may accept more. What cannot be rendered must be refused before it is generated.
        nesting.check_value(self._shown)
        self._items: list[Item] = []
        self._open: Item | None = None
        """The last item, if it has not ended yet."""
        self._text: list[str] = []
        """Text of the open item."""
        self._number = 0
        self._finish_reason: FinishReason | None = None

    def resume(self, choice: int, events: Sequence[Event], end: ChoiceEnd | None) -> None:
        self._begin()
        for _ in self._rendered(events):
            pass
        self._finish_reason = end.finish_reason if end is not None else None

    def chunk(self, piece: Piece) -> bytes:
        events = piece.events if piece.events is not None else [Content(piece.text)] if piece.text else []
        self._finish_reason = piece.finish_reason or self._finish_reason
        start = self._begin() if piece.is_first else b""
        return start + b"".join(self._rendered(events))

    def end(self, usage: Usage) -> bytes:
        ended = self._end_last()
        response = self._response(usage)
        return ended + self._event(f"response.{response['status']}", response=response)

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        (choice,) = choices
        self._finish_reason = choice.finish_reason
        events = choice.events if choice.events is not None else [Content(choice.text)] if choice.text else []
        for _ in self._rendered(events):
            pass
        self._end_last()
        return orjson.dumps(self._response(usage))

    def _begin(self) -> bytes:
        response = self._response(None)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _rendered(self, events: Sequence[Event]) -> Iterator[bytes]:
        for event in events:
            match event:
                case Content(text):
                    yield self._in_item("message", {"role": "assistant", "content": []})
                    yield self._delta("response.output_text.delta", text, content_index=0, logprobs=[])
                case Reasoning(text):
                    yield self._in_item("reasoning", {"summary": [], "content": []})
                    yield self._delta("response.reasoning_text.delta", text, content_index=0)
                case CallBegin(name, index):
                    call_id = self._call_ids.of(0, index)
                    yield self._end_item()
                    yield self._in_item("function_call", {"call_id": call_id, "name": name, "arguments": ""})
                case CallArguments(text):
                    yield self._delta("response.function_call_arguments.delta", text)
                case CallEnd():
                    yield self._end_item()

    def _in_item(self, kind: str, fields: Item) -> bytes:
        if self._open is not None and self._open["type"] == kind:
            return b""
        ended = self._end_item()
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item_id = self._item_ids.of(0, len(self._items), prefix=prefix)
        self._open = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self._items.append(self._open)
        added = self._item_event("response.output_item.added", item=self._open)
        if kind == "function_call":
            return ended + added
        return ended + added + self._item_event("response.content_part.added", content_index=0, part=self._part(""))

    def _delta(self, kind: str, text: str, **fields: Any) -> bytes:
        self._text.append(text)
        rendered = self._item_event(kind, delta=text, **fields)
        self._number += len(text) - 1
        return rendered

    def _end_last(self) -> bytes:
        """End the last item. A call that is still open is incomplete, so no event says that it is done."""
        if self._open is None or self._open["type"] != "function_call":
            return self._end_item(cut=self._finish_reason == "length")
        self._open |= {"status": "incomplete", "arguments": "".join(self._text)}
        return b""

    def _end_item(self, *, cut: bool = False) -> bytes:
        """End the open item. `cut`: the answer's limit ended it."""
        if self._open is None:
            return b""
        item, text = self._open, "".join(self._text)
        item["status"] = "incomplete" if cut else "completed"
        if item["type"] == "function_call":
            item["arguments"] = text
            done = self._item_event("response.function_call_arguments.done", arguments=text, name=item["name"])
        else:
            part = self._part(text)
            item["content"] = [part]
            done = self._text_done(item["type"], text)
            done += self._item_event("response.content_part.done", content_index=0, part=part)
        ended = self._item_event("response.output_item.done", item=item)
        self._open, self._text = None, []
        return done + ended

    def _text_done(self, kind: str, text: str) -> bytes:
        if kind == "reasoning":
            return self._item_event("response.reasoning_text.done", content_index=0, text=text)
        return self._item_event("response.output_text.done", content_index=0, text=text, logprobs=[])

    def _part(self, text: str) -> dict[str, Any]:
        assert self._open is not None  # parts belong to the open item
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        place: dict[str, Any] = {"output_index": len(self._items) - 1}
        if "item" not in fields:
            place["item_id"] = self._items[-1]["id"]
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        return _sse({"type": kind, "sequence_number": number, **fields})

    def _response(self, usage: Usage | None) -> dict[str, Any]:
        """Return the response object. `usage`: usage of a complete answer, None while it is generated."""
        cut = usage is not None and self._finish_reason == "length"
        is_incomplete = cut or (self._open is not None and usage is not None)
        status = "in_progress" if usage is None else "incomplete" if is_incomplete else "completed"
        sampling = self._request.sampling
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._request.created_unix_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": self._request.model,
            "output": self._items,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "background": False,
            "service_tier": "default",
            "top_logprobs": 0,
            **self._shown,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "usage": None if usage is None else _usage(usage),
        }


def error_event(error: PagemillError) -> bytes:
    fields = {"code": error.code or error.type, "message": error.message, "param": error.param}
    return _sse({"type": "error", "sequence_number": 0, **fields})


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _sse(fields: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (fields["type"].encode(), on_one_line(orjson.dumps(fields)))
