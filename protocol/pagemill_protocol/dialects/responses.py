"""OpenAI's Responses API (`POST /v1/responses`): a chat of items, and an answer of items. Nothing is stored."""

from __future__ import annotations

import json

from pagemill_protocol.dialects.openai_responses import render
from pagemill_protocol.dialects.openai_responses.request import ResponsesRequest
from pagemill_protocol.dialects.translation import TranslatedChat, TranslatedDialect, as_request
from pagemill_protocol.dialects.transport import NOWHERE, Place
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.ids import new_id
from pagemill_protocol.openai.parse import parse_body
from pagemill_protocol.openai.render import error_body
from pagemill_protocol.openai.schemas import ChatCompletionRequest

RENAMED = (
    (".function.", "."),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
)


class ResponsesDialect(TranslatedDialect):
    name = "responses"
    path = "/v1/responses"
    prompt_field = "input"
    error_body = staticmethod(error_body)
    error_event = staticmethod(render.error_event)

    def new_request_id(self) -> str:
        return f"resp_{new_id()}"

    def parse(self, raw: bytes, place: Place = NOWHERE) -> TranslatedChat:
        request = parse_body(raw, ResponsesRequest)
        chat = as_request(request.for_chat, RENAMED, ItemsChat)
        return TranslatedChat(chat, self.name, (*RENAMED, ("messages", "input")), json.dumps(request.shown()))

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> render.ResponsesRenderer:
        return render.ResponsesRenderer(request)


class ItemsChat(ChatCompletionRequest):
    @property
    def max_tokens_field(self) -> str:
        return "max_output_tokens"
