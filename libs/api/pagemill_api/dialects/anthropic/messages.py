"""Anthropic's Messages API (`POST /v1/messages`): a chat with blocks in place of fields, and named events."""

from __future__ import annotations

from pagemill_api.dialects.anthropic import render
from pagemill_api.dialects.anthropic.request import CountRequest, MessagesRequest
from pagemill_api.dialects.translation import TranslatedChat, TranslatedDialect, as_request
from pagemill_api.dialects.transport import NO_REQUEST, RequestInfo
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.schemas import ChatCompletionRequest, TokenizeRequest
from pagemill_protocol.ids import new_id
from pagemill_protocol.request.generate import GenerateRequest

RENAMED = (
    (".function.parameters", ".input_schema"),
    (".function.", "."),
    ("stop[", "stop_sequences["),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("response_format.json_schema.schema", "output_config.format.schema"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("chat_template_kwargs.enable_thinking", "thinking"),
    ("chat_template_kwargs.thinking", "thinking"),
)
"""Names of fields in the chat request, with the client's names for them."""


def read_count(raw: bytes) -> TokenizeRequest:
    """Parse the body of `POST /v1/messages/count_tokens`. Raises `PagemillError` 400."""
    chat = as_request(parse_body(raw, CountRequest).for_chat, RENAMED, ChatCompletionRequest)
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
    error_body = staticmethod(render.error_body)
    error_event = staticmethod(render.error_event)

    def new_request_id(self) -> str:
        return f"msg_{new_id()}"

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> TranslatedChat:
        chat = as_request(parse_body(raw, MessagesRequest).for_chat, RENAMED, ChatCompletionRequest)
        return TranslatedChat(chat, self.name, RENAMED)

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> render.MessagesRenderer:
        return render.MessagesRenderer(request)
