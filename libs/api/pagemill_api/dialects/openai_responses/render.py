"""Render answers in the shapes of OpenAI's Responses API: output items, named events.

The last event contains the whole answer, so a renderer stores it; where another engine began the stream, the renderer
first receives the events that were delivered, and the request says how many events the client has got, which depends
on how the text was split. `answer_items` knows the kinds of items.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from pagemill_api.answers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from pagemill_api.dialects.base import AnswerRenderer, ChoiceEnd, FinishedChoice, Piece
from pagemill_api.dialects.openai_responses.answer_items import (
    CALLS,
    AnswerItem,
    MessageItem,
    Part,
    ReasoningItem,
)
from pagemill_api.dialects.openai_responses.request import ENCRYPTED_REASONING
from pagemill_api.dialects.openai_responses.text_logprobs import TextLogprobs
from pagemill_api.dialects.openai_responses.tools import ClientTool
from pagemill_api.openai.call_ids import CallIds
from pagemill_api.openai.render import head
from pagemill_protocol import nesting
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.json_pieces import JsonPieces, JsonRows, on_one_line
from pagemill_protocol.request.generate import FinishReason, GenerateRequest, Usage

CLIENT_TOOLS, INCLUDE = "client_tools", "include"
"""Fields of `GenerateRequest.client_fields` that are not shown."""


class ResponsesRenderer(AnswerRenderer):
    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._id = head(request).id
        self._call_ids = CallIds.of_request(request)
        self._item_ids = CallIds(self._id)
        self._shown: dict[str, Any] = orjson.loads(request.client_fields or "{}")
        # Gateways of other versions may accept more. What cannot be rendered must be refused before it is generated.
        nesting.check_value(self._shown)
        self._seals_reasoning = ENCRYPTED_REASONING in self._shown.pop(INCLUDE, ())
        self._tools = {name: ClientTool(*tool) for name, tool in self._shown.pop(CLIENT_TOOLS, {}).items()}
        """The client's tools by the names of their functions, as far as they are no functions of the same name."""
        self._items: list[AnswerItem] = []
        self._open: AnswerItem | None = None
        """The last item, if it has not ended yet."""
        self.num_events = 0
        """The number of the next event."""
        self._finish_reason: FinishReason | None = None
        self._logprobs = TextLogprobs()
        self._json: JsonPieces | None = None

    def collected_logprobs(self, of_prompt: bool) -> TextLogprobs:
        return self._logprobs

    def resume(self, choice: int, events: Sequence[Event], end: ChoiceEnd | None) -> None:
        self._begin()
        for _ in self._rendered(events):
            pass
        self._finish_reason = end.finish_reason if end is not None else None
        delivered = next((each.num_events for each in self._request.resume if each.index == choice), 0)
        self.num_events = delivered or self.num_events

    def chunk(self, piece: Piece) -> bytes:
        events = piece.events if piece.events is not None else [Content(piece.text)] if piece.text else []
        self._finish_reason = piece.finish_reason or self._finish_reason
        start = self._begin() if piece.is_first else b""
        return start + b"".join(self._rendered(events))

    def end(self, usage: Usage) -> bytes:
        ended = self._end_last()
        response = self._response(usage)
        return ended + self._event(response["status"], response=response)

    def failure(self, error: PagemillError) -> bytes:
        """Return the event that ends the stream: of a response that began, with what it has so far."""
        if not self.num_events:
            return error_event(error)
        self._finish_reason = "length"
        ended = self._end_last()
        failed = {"code": error.code or error.type, "message": error.message}
        response = {**self._response(None), "status": "failed", "error": failed}
        return ended + self._event("failed", response=response)

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes | list[bytes]:
        (choice,) = choices
        self._json = JsonPieces()
        self._finish_reason = choice.finish_reason
        events = choice.events if choice.events is not None else [Content(choice.text)] if choice.text else []
        for _ in self._rendered(events):
            pass
        self._end_last()
        pieces = self._json.write(self._response(usage))
        return pieces[0] if len(pieces) == 1 else pieces

    def _begin(self) -> bytes:
        response = self._response(None)
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def _rendered(self, events: Sequence[Event]) -> Iterator[bytes]:
        for event in events:
            match event:
                case Content(text):
                    begun = self._in_item(MessageItem, logprobs=JsonRows(), json=self._json)
                    yield begun + self._text(text, logprobs=self._logprobs_of(text))
                case Reasoning(text):
                    self._logprobs.skip(text)
                    yield self._in_item(ReasoningItem, is_sealed=self._seals_reasoning) + self._text(text)
                case CallBegin(name, index):
                    tool = self._tools.get(name, ClientTool("function", name))
                    yield self._end_item()
                    yield self._begin_item(CALLS[tool.kind](tool, self._call_ids.of(0, index)))
                case CallArguments(text):
                    self._logprobs.skip(text)
                    yield self._text(text)
                case CallEnd():
                    yield self._end_item()

    def _logprobs_of(self, text: str) -> list[orjson.Fragment]:
        """Return the log probabilities of the next text of the open message, which keeps them."""
        rows = self._logprobs.take(text)
        if isinstance(self._open, MessageItem):
            for row in rows:
                self._open.logprobs.add(row)
        return [orjson.Fragment(row) for row in rows] if self._json is None else []

    def _in_item(self, kind: type[AnswerItem], **settings: Any) -> bytes:
        """Begin an item of this kind, unless one is open."""
        if isinstance(self._open, kind):
            return b""
        return self._end_item() + self._begin_item(kind(**settings))

    def _begin_item(self, item: AnswerItem) -> bytes:
        item_id = self._item_ids.of(0, len(self._items), prefix=item.prefix)
        item.fields = {"id": item_id, "status": "in_progress", **item.fields}
        self._items.append(item)
        self._open = item
        return self._item_event("output_item.added", item=item.fields) + self._parts(item.opening())

    def _text(self, text: str, **fields: Any) -> bytes:
        if self._open is None:
            return b""
        shown = self._open.push(text)
        if not shown or not self._open.delta:
            return b""
        return self._item_event(self._open.delta, delta=shown, **self._open.place, **fields)

    def _end_last(self) -> bytes:
        """End the last item. A call that is still open is incomplete, so no event says that it is done."""
        if self._open is None or not self._open.is_call:
            return self._end_item(cut=self._finish_reason == "length")
        self._open.fields["status"] = "incomplete"
        self._open.cut()
        return b""

    def _end_item(self, *, cut: bool = False) -> bytes:
        """End the open item. `cut`: the answer's limit ended it."""
        item = self._open
        if item is None:
            return b""
        item.fields["status"] = "incomplete" if cut else "completed"
        done = self._parts(item.close()) + self._item_event("output_item.done", item=item.fields)
        self._open = None
        return done

    def _parts(self, parts: Iterator[Part]) -> bytes:
        return b"".join(self._item_event(kind, **fields) for kind, fields in parts)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        place: dict[str, Any] = {"output_index": len(self._items) - 1}
        if "item" not in fields:
            place["item_id"] = self._items[-1].fields["id"]
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self.num_events
        self.num_events += 1
        return _sse({"type": f"response.{kind}", "sequence_number": number, **fields})

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
            "output": [item.fields for item in self._items],
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
            "usage": None if usage is None else usage_fields(usage),
        }


def error_event(error: PagemillError, num_events: int = 0) -> bytes:
    """Return the event that ends a broken stream after `num_events` events."""
    fields = {"code": error.code or error.type, "message": error.message, "param": error.param}
    return _sse({"type": "error", "sequence_number": num_events, **fields})


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _sse(fields: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (fields["type"].encode(), on_one_line(orjson.dumps(fields)))
