"""OpenAI's completions (`POST /v1/completions`): text or token ids, several prompts, `echo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from pagemill_api.answers.events import Event
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
from pagemill_api.openai import logprobs, prepare, render
from pagemill_api.openai.logprobs import CompletionLogprobs
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.schemas import CompletionRequest
from pagemill_protocol.json_pieces import JsonPieces, array_pieces, joined_array, string_pieces
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


class CompletionsBody(ParsedBody):
    renders = False
    fields: CompletionRequest

    def __init__(self, fields: CompletionRequest) -> None:
        self.fields = fields

    def prompt_texts(self, max_chars: int) -> list[str]:
        prompts = (prompt[:max_chars] for prompt in self.fields.prompt)
        return [prompt if isinstance(prompt, str) else repr(prompt) for prompt in prompts]

    def sampling(self, defaults: Mapping[str, Any] = {}) -> SamplingParams:
        return prepare.sampling_of(self.fields, defaults=defaults)

    def check_form(self) -> None:
        prepare.check_form(self.fields)

    def prepare(
        self, tokenizer: Tokenizer, preparation: Preparation, sampling: SamplingParams, text: str | None
    ) -> list[GenerateRequest]:
        given = preparation._asdict()
        del given["parsers"]  # plain completions are not parsed
        return prepare.prepare_completions(self.fields, tokenizer, **given, sampling=sampling)


class CompletionsRenderer(AnswerRenderer):
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
                logprobs=_logprobs_of(piece),
                include_usage=self._include_usage,
                usage=piece.usage,
                stop_reason=piece.stop_reason,
                added=_tokens(piece.token_ids, _prompt(piece.prompt)),
            )
        )

    def end(self, usage: Usage) -> bytes:
        return stream_end(self._head, CompletionsDialect.chunk_object, usage if self._include_usage else None)

    def collected_logprobs(self, of_prompt: bool) -> CompletionLogprobs:
        return CompletionLogprobs()

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> list[bytes]:
        json = JsonPieces()
        echo = string_pieces(self._echo)
        prompt = _prompt(choices[0].prompt, json)  # once for all choices
        rendered = [
            render.Choice(
                each.choice,
                json.text(each.text, echo),
                each.finish_reason,
                _collected(each, json),
                each.stop_reason,
                added=_tokens(each.token_ids, prompt),
            )
            for each in choices
        ]
        return json.write(render.completion_answer(self._head, rendered, usage))


def _logprobs_of(piece: Piece) -> dict[str, Any] | None:
    if piece.positions is None:
        return None
    if not isinstance(piece.prompt.echoed, CompletionLogprobs):
        return logprobs.completions(piece.positions)
    own = CompletionLogprobs()
    own.add(piece.positions)
    return own.value(None, piece.prompt.echoed)


def _collected(choice: FinishedChoice, json: JsonPieces) -> dict[str, Any] | None:
    own, echoed = choice.logprobs, choice.prompt.echoed
    if not isinstance(own, CompletionLogprobs):
        return None
    return own.value(json, echoed if isinstance(echoed, CompletionLogprobs) else None)


def _prompt(report: PromptReport, json: JsonPieces | None = None) -> dict[str, Any]:
    """Return vLLM's fields about the prompt, as far as they were asked for. `json`: writes the body, if it is one."""
    found: dict[str, Any] = {}
    if report.token_ids is not None:
        found["prompt_token_ids"] = (
            report.token_ids if json is None else json.part([orjson.dumps(list(report.token_ids))])
        )
    if report.logprobs is not None:
        rows = report.logprobs
        found["prompt_logprobs"] = joined_array(rows) if json is None else json.part(array_pieces(rows))
    return found


def _tokens(token_ids: Sequence[int] | None, prompt: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's fields about the tokens of choice and prompt, as far as they were asked for."""
    return prompt if token_ids is None else {"token_ids": token_ids, **prompt}
