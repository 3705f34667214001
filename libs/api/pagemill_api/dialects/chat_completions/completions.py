"""OpenAI's completions (`POST /v1/completions`): text or token ids, several prompts, `echo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagemill_api.answers.events import Event
from pagemill_api.answers.registry import ParserSettings
from pagemill_api.dialects.base import ChoiceEnd, FinishedChoice, Piece, Preparation
from pagemill_api.dialects.chat_completions.openai_dialect import OpenAIDialect, stream_end
from pagemill_api.dialects.transport import NO_REQUEST, RequestInfo
from pagemill_api.openai import logprobs, prepare, render
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.schemas import CompletionRequest
from pagemill_protocol.request.generate import GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer


class CompletionsDialect(OpenAIDialect):
    name = "completions"
    path = "/v1/completions"
    operation = "text_completion"
    prompt_field = "prompt"
    id_prefix = "cmpl"
    chunk_object = "text_completion"

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> CompletionsBody:
        return CompletionsBody(parse_body(raw, CompletionRequest))

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> CompletionsRenderer:
        return CompletionsRenderer(request, system_fingerprint)


class CompletionsBody:
    renders = False

    def __init__(self, fields: CompletionRequest) -> None:
        self.fields = fields

    def prompt_texts(self, max_chars: int) -> list[str]:
        prompts = (prompt[:max_chars] for prompt in self.fields.prompt)
        return [prompt if isinstance(prompt, str) else repr(prompt) for prompt in prompts]

    def sampling(self, defaults: Mapping[str, Any] = {}) -> SamplingParams:
        return prepare.sampling_of(self.fields, defaults=defaults)

    def check_form(self) -> None:
        prepare.check_form(self.fields)

    async def render_inline(self, tokenizer: Tokenizer, parsers: ParserSettings) -> str | None:
        return None

    def prepare(
        self, tokenizer: Tokenizer, preparation: Preparation, sampling: SamplingParams, text: str | None
    ) -> list[GenerateRequest]:
        given = preparation._asdict()
        del given["parsers"]  # plain completions are not parsed
        return prepare.prepare_completions(self.fields, tokenizer, **given, sampling=sampling)


class CompletionsRenderer:
    def __init__(self, request: GenerateRequest, system_fingerprint: str | None) -> None:
        self._head = render.head(request, system_fingerprint)
        self._include_usage = request.include_usage
        self._echo = request.prompt_text or ""

    def resume(self, choice: int, events: Sequence[Event], end: ChoiceEnd | None) -> None:
        """No state is needed: every chunk is self-contained."""

    def chunk(self, piece: Piece) -> bytes:
        return render.sse(
            render.completion_chunk(
                self._head,
                piece.choice,
                (self._echo if piece.is_first else "") + piece.text,
                finish_reason=piece.finish_reason,
                logprobs=None
                if piece.positions is None
                else logprobs.completions(piece.positions, piece.num_chars_before),
                include_usage=self._include_usage,
                usage=piece.usage,
                stop_reason=piece.stop_reason,
                added=_tokens(piece),
            )
        )

    def end(self, usage: Usage) -> bytes:
        return stream_end(self._head, CompletionsDialect.chunk_object, usage if self._include_usage else None)

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        rendered = [
            render.Choice(
                each.choice,
                self._echo + each.text,
                each.finish_reason,
                None if each.positions is None else logprobs.completions(each.positions, each.num_chars_before),
                each.stop_reason,
                added=_tokens(each),
            )
            for each in choices
        ]
        return render.completion_body(self._head, rendered, usage)


def _tokens(part: Piece | FinishedChoice) -> dict[str, Any]:
    """Return vLLM's fields about the tokens of choice and prompt, as far as they were asked for."""
    found = {
        "token_ids": part.token_ids,
        "prompt_token_ids": part.prompt.token_ids,
        "prompt_logprobs": part.prompt.logprobs,
    }
    return {name: value for name, value in found.items() if value is not None}
