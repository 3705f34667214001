"""OpenAI's Responses API (`POST /v1/responses`): a chat of items, and an answer of items.

The dialect stores nothing. A gateway that stores responses makes a `StoredResponsesDialect` for each request.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from pagemill_api.dialects.openai_responses import render
from pagemill_api.dialects.openai_responses.request import Item, ResponsesRequest
from pagemill_api.dialects.translation import TranslatedChat, TranslatedDialect, as_request
from pagemill_api.dialects.transport import NO_REQUEST, RequestInfo
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.schemas import ChatCompletionRequest
from pagemill_protocol.errors import error_body, invalid_field
from pagemill_protocol.ids import new_id
from pagemill_protocol.request.generate import GenerateRequest

RENAMED = (
    (".function.", "."),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
)


class ResponsesDialect(TranslatedDialect):
    name = "responses"
    path = "/v1/responses"
    prompt_field = "input"
    error_body = staticmethod(error_body)
    error_event = staticmethod(render.error_event)

    def new_request_id(self) -> str:
        return f"resp_{new_id()}"

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> TranslatedChat:
        request = parse_body(raw, ResponsesRequest)
        if request.previous_response_id is not None:
            raise invalid_field(
                "previous_response_id",
                "`previous_response_id` is not supported here: responses are not stored. Gateways whose settings have "
                "`stored_responses` store them. Send the whole conversation as `input`.",
                code="unsupported_parameter",
            )
        return self._translated(request)

    def _translated(
        self, request: ResponsesRequest, before: Sequence[Item] = (), *, stored: bool = False
    ) -> TranslatedChat:
        chat = as_request(lambda: request.for_chat(before), RENAMED, ItemsChat)
        shown = orjson.dumps(request.shown(stored=stored)).decode()
        return TranslatedChat(chat, self.name, (*RENAMED, ("messages", "input")), shown)

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> render.ResponsesRenderer:
        return render.ResponsesRenderer(request)


class StoredResponsesDialect(ResponsesDialect):
    """The dialect of one request to a gateway that stores responses."""

    def __init__(self, before: Sequence[Item] = ()) -> None:
        """Make the dialect. `before`: items of the previous response, including its input."""
        self._before = before
        self.stores = False
        """Whether the answer is to be stored; set once the body is parsed."""
        self.input: list[Item] = []
        """All items from which the answer is generated."""

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> TranslatedChat:
        request = parse_body(raw, ResponsesRequest)
        self.stores = request.store
        self.input = [*self._before, *request.input]
        return self._translated(request, self._before, stored=request.store)


class ItemsChat(ChatCompletionRequest):
    @property
    def max_tokens_field(self) -> str:
        return "max_output_tokens"
