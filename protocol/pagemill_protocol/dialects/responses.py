"""OpenAI's Responses API (`POST /v1/responses`): a chat of items, and an answer of items. Nothing is stored."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from pagemill_protocol.dialects.base import Preparation
from pagemill_protocol.dialects.chat import ChatBody
from pagemill_protocol.dialects.openai_responses import render
from pagemill_protocol.dialects.openai_responses.request import ResponsesRequest
from pagemill_protocol.dialects.translation import TranslatedDialect, as_chat, with_names
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.ids import new_id
from pagemill_protocol.openai.parse import parse_body
from pagemill_protocol.openai.render import error_body
from pagemill_protocol.openai.schemas import ChatCompletionRequest
from pagemill_protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from pagemill_protocol.text.tokenizer import Tokenizer

RENAMED = (
    (".function.", "."),
    (".allowed_tools.", "."),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
)


class ResponsesDialect(TranslatedDialect):
    name = "responses"
    path = "/v1/responses"
    prompt_field = "input"

    def new_request_id(self) -> str:
        return f"resp_{new_id()}"

    def parse(self, raw: bytes) -> ResponsesBody:
        return ResponsesBody(parse_body(raw, ResponsesRequest))

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> render.ResponsesRenderer:
        return render.ResponsesRenderer(request)

    def error_body(self, error: PagemillError) -> bytes:
        return error_body(error)

    def error_event(self, error: PagemillError) -> bytes:
        return render.error_event(error)


class ItemsChat(ChatCompletionRequest):
    @property
    def max_tokens_field(self) -> str:
        return "max_output_tokens"


class ResponsesBody(ChatBody):
    def __init__(self, request: ResponsesRequest) -> None:
        super().__init__(as_chat(request.for_chat, RENAMED, ItemsChat))
        self._client_fields = json.dumps(request.shown())

    def prepare(
        self, tokenizer: Tokenizer, preparation: Preparation, sampling: SamplingParams, text: str | None
    ) -> list[GenerateRequest]:
        try:
            prepared = super().prepare(tokenizer, preparation, sampling, text)
        except PagemillError as error:
            raise with_names(error, (*RENAMED, ("messages", "input"))) from None
        added = {"dialect": ResponsesDialect.name, "client_fields": self._client_fields}
        return [msgspec.structs.replace(each, **added) for each in prepared]
