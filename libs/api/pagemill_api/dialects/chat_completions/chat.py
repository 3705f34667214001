"""OpenAI's chat completions (`POST /v1/chat/completions`), with vLLM's extra sampling fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagemill_api.answers.events import Event, calls_are_complete
from pagemill_api.dialects.base import (
    AnswerRenderer,
    ChoiceEnd,
    FinishedChoice,
    ParsedBody,
    Piece,
    Preparation,
    PromptReport,
)
from pagemill_api.dialects.chat_completions.openai_dialect import OpenAIDialect, stream_end
from pagemill_api.dialects.transport import NO_REQUEST, RequestInfo
from pagemill_api.openai import call_parts, logprobs, prepare, render, unread_fields
from pagemill_api.openai.call_ids import CallIds
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.schemas import ChatCompletionRequest
from pagemill_protocol.json_pieces import JsonPieces, array_pieces, joined_array
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.generate import FinishReason, GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer


class ChatDialect(OpenAIDialect):
    name = "chat"
    path = "/v1/chat/completions"
    operation = "chat"
    prompt_field = "messages"
    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> ChatBody:
        return ChatBody(parse_body(raw, ChatCompletionRequest))

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> ChatRenderer:
        return ChatRenderer(request, system_fingerprint)


class ChatBody(ParsedBody):
    renders = True
    fields: ChatCompletionRequest

    def __init__(self, fields: ChatCompletionRequest) -> None:
        self.fields = fields

    def prompt_texts(self, max_chars: int) -> list[str]:
        """Return the first user message, since system prompts are often the same for all users."""
        return [next((each.content for each in self.fields.messages if each.role == "user"), "")[:max_chars]]

    def sampling(self, defaults: Mapping[str, Any] = {}) -> SamplingParams:
        return prepare.sampling_of(self.fields, defaults=defaults)

    def check_form(self) -> None:
        prepare.check_form(self.fields)

    async def render_inline(self, tokenizer: Tokenizer, parsers: ParserSettings) -> str | None:
        if unread_fields.has_names(self.fields):  # `unread_fields` will render it too, which blocks
            return None
        return await prepare.render_inline(self.fields, tokenizer, parsers)

    def unread_fields(self, tokenizer: Tokenizer, parsers: ParserSettings) -> list[str]:
        """Return the names of fields that only chat templates read, and the model's does not."""
        return unread_fields.unread_fields(self.fields, tokenizer, parsers)

    def prepare(
        self, tokenizer: Tokenizer, preparation: Preparation, sampling: SamplingParams, text: str | None
    ) -> list[GenerateRequest]:
        return [
            prepare.prepare_chat(self.fields, tokenizer, **preparation._asdict(), sampling=sampling, text=text),
        ]


class ChatRenderer(AnswerRenderer):
    def __init__(self, request: GenerateRequest, system_fingerprint: str | None) -> None:
        self._head = render.head(request, system_fingerprint)
        self._include_usage = request.include_usage
        self._ids = CallIds.of_request(request)
        self._named = request.answer_format is not None and request.answer_format.named

    def resume(self, choice: int, events: Sequence[Event], end: ChoiceEnd | None) -> None:
        """No state is needed: every chunk is self-contained."""

    def chunk(self, piece: Piece) -> bytes:
        if piece.events is None:
            return self._chunk(piece, piece.text, {}, role=piece.is_first, ends=True)
        found = (call_parts.delta(event, self._ids, piece.choice) for event in piece.events)
        deltas = [each for each in found if each is not None]
        if not deltas and not (piece.is_first or piece.positions or piece.token_ids or piece.finish_reason):
            return b""
        if piece.is_first:
            deltas.insert(0, {"content": ""})
        last = len(deltas) - 1
        return b"".join(
            self._chunk(piece, None, delta, role=piece.is_first and at == 0, ends=at == last)
            for at, delta in enumerate(deltas)
        ) or self._chunk(piece, None, {}, role=False, ends=True)

    def _chunk(self, piece: Piece, text: str | None, added: Mapping[str, Any], *, role: bool, ends: bool) -> bytes:
        """Render one chunk. `ends`: the last of a piece's chunks, which also has the data of the whole piece."""
        return render.sse(
            render.chat_chunk(
                self._head,
                piece.choice,
                text,
                role=role,
                finish_reason=self._reason(piece.finish_reason, piece.calls_are_complete) if ends else None,
                logprobs=logprobs.chat(piece.positions) if ends and piece.positions is not None else None,
                include_usage=self._include_usage,
                usage=piece.usage if ends else None,
                added=added,
                stop_reason=piece.stop_reason if ends else None,
                token_ids=piece.token_ids if ends else None,
                prompt=_prompt(piece.prompt) if role else None,
            )
        )

    def _reason(self, reason: FinishReason | None, has_calls: bool) -> FinishReason | render.ToolReason | None:
        return call_parts.finish_reason(reason, has_calls, named=self._named)

    def end(self, usage: Usage) -> bytes:
        return stream_end(self._head, ChatDialect.chunk_object, usage if self._include_usage else None)

    def collected_logprobs(self, of_prompt: bool) -> logprobs.ChatLogprobs:
        return logprobs.ChatLogprobs()

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> list[bytes]:
        json = JsonPieces()
        rendered = [self._choice(each, json) for each in choices]
        return json.write(render.chat_answer(self._head, rendered, usage, _prompt(choices[0].prompt, json)))

    def _choice(self, choice: FinishedChoice, json: JsonPieces) -> render.Choice:
        shown = choice.logprobs.value(json) if isinstance(choice.logprobs, logprobs.ChatLogprobs) else None
        tokens = None if choice.token_ids is None else {"token_ids": choice.token_ids}
        if choice.events is None:
            message: dict[str, Any] = {"content": json.text(choice.text)}
            return render.Choice(choice.choice, "", choice.finish_reason, shown, choice.stop_reason, message, tokens)
        message = call_parts.message(choice.events, self._ids, choice.choice)
        reason = self._reason(choice.finish_reason, calls_are_complete(choice.events))
        assert reason is not None  # the choice is finished
        return render.Choice(choice.choice, "", reason, shown, choice.stop_reason, message, tokens)


def _prompt(report: PromptReport, json: JsonPieces | None = None) -> dict[str, Any]:
    """Return vLLM's fields about the prompt, as far as they were asked for. `json`: writes the body, if it is one."""
    found: dict[str, Any] = {"prompt_token_ids": report.token_ids}
    if report.logprobs is not None:
        rows = report.logprobs
        found["prompt_logprobs"] = joined_array(rows) if json is None else json.part(array_pieces(rows))
    return {name: value for name, value in found.items() if value is not None}
