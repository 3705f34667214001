"""OpenAI's chat completions (`POST /v1/chat/completions`), with vLLM's extra sampling fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagemill_protocol.dialects.base import FinishedChoice, Piece, Preparation
from pagemill_protocol.dialects.openai_dialect import OpenAIDialect, stream_end
from pagemill_protocol.generate import GenerateRequest, Usage
from pagemill_protocol.openai import logprobs, prepare, render
from pagemill_protocol.openai.parse import parse_body
from pagemill_protocol.openai.schemas import ChatCompletionRequest
from pagemill_protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from pagemill_protocol.text.tokenizer import Tokenizer


class ChatDialect(OpenAIDialect):
    name = "chat"
    path = "/v1/chat/completions"
    operation = "chat"
    prompt_field = "messages"
    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def parse(self, raw: bytes) -> ChatBody:
        return ChatBody(parse_body(raw, ChatCompletionRequest))

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> ChatRenderer:
        return ChatRenderer(request, system_fingerprint)


class ChatBody:
    renders = True

    def __init__(self, fields: ChatCompletionRequest) -> None:
        self.fields = fields

    def prompt_texts(self, max_chars: int) -> list[str]:
        """The first user message: system prompts are often the same for all users."""
        return [next((each.content for each in self.fields.messages if each.role == "user"), "")[:max_chars]]

    def sampling(self) -> SamplingParams:
        return prepare.sampling_of(self.fields)

    async def render_soon(self, tokenizer: Tokenizer) -> str | None:
        return await prepare.render_soon(self.fields, tokenizer)

    def prepare(
        self, tokenizer: Tokenizer, preparation: Preparation, sampling: SamplingParams, text: str | None
    ) -> list[GenerateRequest]:
        return [
            prepare.prepare_chat(self.fields, tokenizer, **preparation._asdict(), sampling=sampling, text=text),
        ]


class ChatRenderer:
    def __init__(self, request: GenerateRequest, system_fingerprint: str | None) -> None:
        self._head = render.head(request, system_fingerprint)
        self._include_usage = request.include_usage

    def chunk(self, piece: Piece) -> bytes:
        return render.sse(
            render.chat_chunk(
                self._head,
                piece.choice,
                piece.text,
                role=piece.is_first,
                finish_reason=piece.finish_reason,
                logprobs=None if piece.positions is None else logprobs.chat(piece.positions),
                include_usage=self._include_usage,
                usage=piece.usage,
            )
        )

    def end(self, usage: Usage) -> bytes:
        return stream_end(self._head, ChatDialect.chunk_object, usage if self._include_usage else None)

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        rendered = [
            render.Choice(
                each.choice,
                each.text,
                each.finish_reason,
                None if each.positions is None else logprobs.chat(each.positions),
            )
            for each in choices
        ]
        return render.chat_body(self._head, rendered, usage)
