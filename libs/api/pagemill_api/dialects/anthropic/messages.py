"""Anthropic's Messages API (`POST /v1/messages`): a chat with blocks in place of fields, and named events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import Field
from pydantic_core import PydanticCustomError

from pagemill_api.answers.registry import detect_reasoning
from pagemill_api.dialects.anthropic import edits, render
from pagemill_api.dialects.anthropic.conversation import ChatMessages
from pagemill_api.dialects.anthropic.edits import ContextManagement, Messages
from pagemill_api.dialects.anthropic.request import CountRequest, MessagesRequest
from pagemill_api.dialects.base import Preparation
from pagemill_api.dialects.translation import Renamed, TranslatedChat, TranslatedDialect, as_request
from pagemill_api.dialects.transport import NO_REQUEST, SSE, RequestInfo
from pagemill_api.openai import prepare
from pagemill_api.openai.parse import from_refusal, parse_body
from pagemill_api.openai.schemas import ChatCompletionRequest, TokenizeRequest
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.ids import new_id
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer

RENAMED = (
    (".function.parameters", ".input_schema"),
    (".function.arguments", ".input"),
    (".tool_call_id", ".tool_use_id"),
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


class MessagesChat(ChatCompletionRequest):
    """A chat request with what only Anthropic's API has."""

    deferred_tools: list[str] = Field(default_factory=list)

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        return [tool for tool in self.prompt_tools if tool["function"]["name"] not in self.deferred_tools]

    @property
    def may_move_system(self) -> bool:
        return True


class CountedMessages(TokenizeRequest):
    """Messages whose tokens are counted as those of a `MessagesChat`."""

    @property
    def may_move_system(self) -> bool:
        return True


class MessagesBody(TranslatedChat):
    """A parsed body; edits of the context, and what the model cannot read, are decided when the model is known."""

    fields: MessagesChat

    def __init__(
        self,
        chat: MessagesChat,
        dialect: str,
        conversation: ChatMessages,
        management: ContextManagement | None,
        unknown: Sequence[str],
    ) -> None:
        """`unknown`: fields of the body that this API does not have."""
        super().__init__(chat, dialect, _names(conversation))
        self._management = management
        self._unread = [*conversation.unread, *unknown]

    async def render_inline(self, tokenizer: Tokenizer, parsers: ParserSettings) -> str | None:
        has_edits = self._management is not None and self._management.edits
        if has_edits or self.fields.reasoning_budget is not None:
            return None  # `prepare` may render other messages, or without a budget
        return await super().render_inline(tokenizer, parsers)

    def unread_fields(self, tokenizer: Tokenizer, parsers: ParserSettings) -> list[str]:
        return sorted({*super().unread_fields(tokenizer, parsers), *self._unread})

    def prepare(
        self, tokenizer: Tokenizer, preparation: Preparation, sampling: SamplingParams, text: str | None
    ) -> list[GenerateRequest]:
        if self._has_useless_budget(tokenizer, preparation.parsers):
            self.fields = self.fields.model_copy(update={"thinking_token_budget": None})
            self._unread.append("thinking.budget_tokens")
        if self._management is not None:
            self._edit(self._management, tokenizer, preparation)
        return super().prepare(tokenizer, preparation, sampling, text)

    def _edit(self, management: ContextManagement, tokenizer: Tokenizer, preparation: Preparation) -> None:
        def count(messages: Messages) -> int:
            fields = self.fields.model_copy(update={"messages": [*messages]})
            return prepare.num_prompt_tokens(fields, tokenizer, preparation.parsers, preparation.cache_salt)

        with self._named():
            messages, applied = edits.apply(management.edits, self.fields.messages, count)
        self.fields = self.fields.model_copy(update={"messages": [*messages]})
        self._added["client_fields"] = orjson.dumps({"applied_edits": applied}).decode()

    def _has_useless_budget(self, tokenizer: Tokenizer, parsers: ParserSettings) -> bool:
        """Whether the client limits reasoning, and the model does none that is separate in its answer."""
        if self.fields.reasoning_budget is None:
            return False
        template = tokenizer.chat_template.source(has_tools=bool(self.fields.template_tools))
        return not detect_reasoning(template, parsers.reasoning)

    @contextmanager
    def _named(self) -> Iterator[None]:
        with super()._named():
            try:
                yield
            except PagemillError as error:
                error.message = _context_words(error)
                raise


def _context_words(error: PagemillError) -> str:
    """Return the message of an error; of a prompt that is too long, in the words that Anthropic's clients look for."""
    if error.context is None:
        return error.message
    num_prompt, num_answer, most = error.context
    if not num_answer:
        return f"prompt is too long: {num_prompt} tokens > {most} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {num_prompt} + {num_answer} > {most}, decrease input "
        "length or `max_tokens` and try again"
    )


def _names(conversation: ChatMessages) -> Sequence[Renamed]:
    return conversation.client_path, *RENAMED


def _translated(body: MessagesRequest) -> tuple[MessagesChat, ChatMessages]:
    """Return the chat request of a body. Raises `PagemillError` 400."""
    try:
        chat, conversation = body.for_chat()
    except PydanticCustomError as error:
        raise from_refusal(error) from None
    return as_request(lambda: chat, _names(conversation), MessagesChat), conversation


def read_count(raw: bytes) -> TokenizeRequest:
    """Parse the body of `POST /v1/messages/count_tokens`. Raises `PagemillError` 400."""
    body = parse_body(raw, CountRequest)
    chat, _ = _translated(body)
    messages: Messages = chat.messages
    for edit in body.context_management.edits if body.context_management is not None else ():
        applied = edit.cleared(messages, len)
        messages = messages if applied is None else applied.messages
    return CountedMessages(
        model=chat.model,
        messages=[*messages],
        tools=chat.template_tools,
        chat_template_kwargs=chat.template_kwargs,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
    )


def ping(left_s: float | None) -> bytes:
    """Return the event that Anthropic's API sends while a request waits, which its clients skip."""
    return b'event: ping\ndata: {"type": "ping"}\n\n'


class MessagesDialect(TranslatedDialect):
    name = "messages"
    transport = SSE._replace(waiting=ping)
    path = "/v1/messages"
    prompt_field = "messages"
    error_body = staticmethod(render.error_body)
    error_event = staticmethod(render.error_event)

    def new_request_id(self) -> str:
        return f"msg_{new_id()}"

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> MessagesBody:
        body = parse_body(raw, MessagesRequest)
        chat, conversation = _translated(body)
        return MessagesBody(chat, self.name, conversation, body.context_management, body.unknown_fields)

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> render.MessagesRenderer:
        return render.MessagesRenderer(request)
