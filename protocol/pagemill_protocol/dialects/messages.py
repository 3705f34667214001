"""Anthropic's Messages API (`POST /v1/messages`): a chat with blocks in place of fields, and named events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pagemill_protocol.dialects.anthropic import render
from pagemill_protocol.dialects.anthropic.request import CountRequest, MessagesRequest
from pagemill_protocol.dialects.base import Preparation
from pagemill_protocol.dialects.chat import ChatBody
from pagemill_protocol.dialects.translation import TranslatedDialect, as_chat, with_names
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.ids import new_id
from pagemill_protocol.openai.parse import parse_body
from pagemill_protocol.openai.schemas import ChatCompletionRequest, TokenizeRequest
from pagemill_protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from pagemill_protocol.text.tokenizer import Tokenizer

RENAMED = (
    (".function.parameters", ".input_schema"),
    (".function.", "."),
    ("stop[", "stop_sequences["),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("response_format.json_schema.schema", "output_config.format.schema"),
)
"""Places in the chat request, and the same ones in the client's."""


def read_count(raw: bytes) -> TokenizeRequest:
    """Body of `POST /v1/messages/count_tokens`. Raises `PagemillError` 400."""
    chat = as_chat(parse_body(raw, CountRequest).for_chat, RENAMED, ChatCompletionRequest)
    return TokenizeRequest(
        model=chat.model,
        messages=chat.messages,
        tools=chat.prompt_tools,
        chat_template_kwargs=chat.template_kwargs,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
    )


class MessagesDialect(TranslatedDialect):
    name = "messages"
    path = "/v1/messages"
    prompt_field = "messages"

    def new_request_id(self) -> str:
        return f"msg_{new_id()}"

    def parse(self, raw: bytes) -> MessagesBody:
        return MessagesBody(as_chat(parse_body(raw, MessagesRequest).for_chat, RENAMED, ChatCompletionRequest))

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> render.MessagesRenderer:
        return render.MessagesRenderer(request)

    def error_body(self, error: PagemillError) -> bytes:
        return render.error_body(error)

    def error_event(self, error: PagemillError) -> bytes:
        return render.error_event(error)


class MessagesBody(ChatBody):
    def prepare(
        self, tokenizer: Tokenizer, preparation: Preparation, sampling: SamplingParams, text: str | None
    ) -> list[GenerateRequest]:
        try:
            prepared = super().prepare(tokenizer, preparation, sampling, text)
        except PagemillError as error:
            raise with_names(error, RENAMED) from None
        return [msgspec.structs.replace(each, dialect=MessagesDialect.name) for each in prepared]
