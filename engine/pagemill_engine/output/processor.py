"""Turns one request's token ids into the bytes for its client, with the meta for a gateway.

`ChoiceOutput` turns tokens into text, the request's dialect (`pagemill_api.dialects`) renders it, and this module
decides which chunk is sent when. Streaming: one frame per output, whose payload is complete events (or nothing while
text is held back), then a last frame that contains only the end of the stream, so that a gateway which merges several
prompts can replace it. Not streaming: one last frame with the whole body in pieces, of which log probabilities were
rendered as they came, and before it frames that only report the tokens so far. An answer that another engine began
(`resume`) continues with the same frames that its first engine would have sent. This runs in the HTTP process; it uses
neither sockets nor the engine. Large outputs are divided into parts of some milliseconds each (`parts_of`); tokens are
processed one at a time, so the answer does not depend on the division.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from pagemill_api.dialects.base import (
    ChoiceEnd,
    FinishedChoice,
    Piece,
    PromptReport,
)
from pagemill_api.dialects.registry import dialect_of
from pagemill_api.openai import logprobs
from pagemill_api.openai.render import choice_index
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.ipc.messages import LogprobsOut, TokensOut
from pagemill_engine.output.best_of import MeanLogprob, best
from pagemill_engine.output.choice import ChoiceDelta, ChoiceOutput
from pagemill_engine.output.kept import KeptChoice, ReportedPrompt
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.json_pieces import PIECE_BYTES
from pagemill_protocol.request.continuing import PROGRESS_TOKENS, can_be_continued, has_begun
from pagemill_protocol.request.generate import FrameMeta, GenerateRequest, Usage


class Frame(NamedTuple):
    """One piece of an answer: the payload for the client, and the meta for a gateway."""

    meta: FrameMeta
    payload: bytes
    rest: Sequence[bytes] = ()
    """The further pieces of the payload, if it is a large body; the same piece may occur several times."""

    @property
    def num_bytes(self) -> int:
        return len(self.payload) + sum(map(len, self.rest))


PART_TOKENS = 64
"""Most tokens of one part, of the answer or of the report on the prompt: with 20 alternatives 2 ms of work."""


@dataclass(slots=True)
class Progress:
    """The result of one engine output."""

    frames: list[Frame] = field(default_factory=list)
    stopped_choices: list[int] = field(default_factory=list)
    """Choices that a stop string has ended; the engine must be notified."""
    done: bool = False
    error: PagemillError | None = None
    """The error with which the engine failed this request; nothing was rendered."""


class Processor(Protocol):
    """Turns one request's outputs into frames, or into the offline API's objects."""

    request: GenerateRequest
    num_held_bytes: int
    """Memory for the part of an answer that is not in a frame yet: all of it before the end if it is not streamed."""

    @property
    def complete(self) -> bool: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def num_new_tokens(self) -> int: ...
    @property
    def finish_reasons(self) -> list[str]: ...
    def push(self, out: TokensOut) -> Progress: ...
    def failure(self, error: PagemillError) -> Frame: ...
    def last_frame(self) -> Frame: ...


@dataclass(slots=True)
class _Choice:
    output: ChoiceOutput
    index: int
    started: bool
    """Whether its first chunk was sent, by this engine or the previous one."""
    kept: KeptChoice | None = None
    """Text and log probabilities of the whole choice; None when streaming."""
    positions: list[logprobs.PositionLogprobs] = field(default_factory=list)
    """Log probabilities that are not rendered yet; only when streaming."""
    repeated: logprobs.CollectedLogprobs | None = None
    """Log probabilities that the end of a stream repeats."""
    likelihood: MeanLogprob = field(default_factory=MeanLogprob)
    """Computed only if the client gets the best of several candidates."""
    unreported: list[int] = field(default_factory=list)
    """Tokens that were in no frame yet; only if not streaming."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens that the client did not get yet; only if it asked for token ids."""


class OutputProcessor:
    """The output state of one `GenerateRequest`."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, system_fingerprint: str | None = None) -> None:
        self.request = request
        self.num_held_bytes = 0
        self._tokenizer = tokenizer
        self._dialect = dialect_of(request.dialect)
        self._renderer = self._dialect.renderer(request, system_fingerprint)
        num_reported = request.sampling.num_reported
        self._first = request.prompt_index * num_reported
        self._choices = {index: self._new_choice(index) for index in range(self._first, self._first + num_reported)}
        """Choices by the engine's index, which is also the client's unless the client gets the best of several."""
        self._chooses = num_reported > request.sampling.n
        self._reports_progress = can_be_continued(request) and not request.stream
        self._num_cached_tokens = request.cached_tokens or 0
        self._cached_is_known = request.cached_tokens is not None
        self._num_proposed = self._num_accepted = 0
        self._queue_s = 0.0
        self._reports_logprobs = request.sampling.num_alternatives is not None
        self._prompt = ReportedPrompt(request, self._tokenizer, self._renderer)
        self._created_at = time.monotonic()
        self._first_token_s = 0.0

    @property
    def usage(self) -> Usage:
        """Tokens of all candidates so far, without overshoot behind stop strings."""
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=sum(choice.output.num_tokens for choice in self._choices.values()),
            cached_tokens=min(self._num_cached_tokens, len(self.request.prompt_token_ids)),
            reasoning_tokens=self._reasoning_tokens(),
            accepted_prediction_tokens=self._num_accepted if self.request.predicted_token_ids else None,
            rejected_prediction_tokens=(
                self._num_proposed - self._num_accepted if self.request.predicted_token_ids else None
            ),
            proposed_tokens=self._num_proposed,
            accepted_tokens=self._num_accepted,
        )

    def _reasoning_tokens(self) -> int | None:
        answer_format = self.request.answer_format
        if answer_format is None or not answer_format.reasoning:
            return None
        return sum(choice.output.num_reasoning_tokens for choice in self._choices.values())

    @property
    def num_new_tokens(self) -> int:
        """Number of completion tokens in `usage` that were not generated before a resume."""
        return self.usage.completion_tokens - sum(len(resume.token_ids) for resume in self.request.resume)

    @property
    def complete(self) -> bool:
        """Whether every choice was finished before the resume: only `last_frame` is missing."""
        return all(choice.output.finish_reason for choice in self._choices.values())

    @property
    def finish_reasons(self) -> list[str]:
        return [choice.output.finish_reason or "abort" for choice in self._choices.values()]

    def push(self, out: TokensOut) -> Progress:
        """Process one engine output."""
        if out.error is not None:
            return Progress(error=engine_error(out))
        choice = self._choices[out.choice]
        if out.choice == self._first and not self._cached_is_known:
            self._num_cached_tokens = max(self._num_cached_tokens, out.num_cached_tokens)
        self._queue_s = max(self._queue_s, out.queue_s)
        self._num_proposed += out.num_proposed
        self._num_accepted += out.num_accepted
        if out.prompt_logprobs:
            self.num_held_bytes += self._prompt.add(out.prompt_logprobs)
            if not out.token_ids and out.finish_reason is None:  # a part of the report on a long prompt
                return Progress()
        self._first_token_s = self._first_token_s or time.monotonic() - self._created_at
        was_running = choice.output.finish_reason is None
        if self.request.prompt_only:
            delta = choice.output.push((), (), "length")
        else:
            delta = choice.output.push(out.token_ids, out.logprobs, out.finish_reason)
        progress = Progress()
        if was_running:
            self._deliver(choice, delta, progress)
        return progress

    def failure(self, error: PagemillError) -> Frame:
        """Return the frame that ends the request with `error`."""
        if self.request.stream:
            payload = self._renderer.failure(error) or self._dialect.error_event(error)
        else:
            payload = self._dialect.error_body(error)
        return Frame(failure_meta(error, self.usage), payload)

    def _deliver(self, choice: _Choice, delta: ChoiceDelta, progress: Progress) -> None:
        positions: list[logprobs.PositionLogprobs] = []
        if self._reports_logprobs:
            positions = [self._position(*each) for each in zip(delta.logprobs, delta.offsets, strict=False)]
        if self._chooses:
            choice.likelihood.add(delta.logprobs)
        if choice.kept is not None:
            self.num_held_bytes += choice.kept.add(delta.text, delta.events, positions, delta.token_ids)
        else:
            choice.positions += positions
            if choice.repeated is not None:
                before = choice.repeated.num_bytes
                choice.repeated.add(positions)
                self.num_held_bytes += choice.repeated.num_bytes - before
            if self.request.return_token_ids:
                choice.token_ids += delta.token_ids
            progress.frames.append(self._chunk_frame(choice, delta))
        if choice.output.stopped_by_text:
            progress.stopped_choices.append(choice.index)
        if delta.finish_reason is not None and self.complete:
            progress.done = True
            progress.frames.append(self.last_frame())
        elif self._reports_progress:
            progress.frames += self._progress_frames(choice, delta)

    def _chunk_frame(self, choice: _Choice, delta: ChoiceDelta) -> Frame:
        shows = delta.text or choice.positions or choice.token_ids or delta.finish_reason
        payload = self._chunk(choice, delta) if shows else b""
        meta = FrameMeta(
            choice=choice.index,
            token_ids=list(delta.token_ids),
            num_text_chars=choice.output.num_text_chars,
            position=choice.output.num_tokens,
            num_events=self._renderer.num_events,
            finish_reason=delta.finish_reason,
            cached_tokens=self._cached_tokens_once(choice),
        )
        return Frame(meta, payload)

    def _progress_frames(self, choice: _Choice, delta: ChoiceDelta) -> list[Frame]:
        choice.unreported += delta.token_ids
        if len(choice.unreported) < PROGRESS_TOKENS and delta.finish_reason is None:
            return []
        meta = FrameMeta(
            choice=choice.index,
            token_ids=choice.unreported,
            position=choice.output.num_tokens,
            finish_reason=delta.finish_reason,
            cached_tokens=self._cached_tokens_once(choice),
        )
        choice.unreported = []
        return [Frame(meta, b"")]

    def _cached_tokens_once(self, choice: _Choice) -> int:
        """Return the number of cached prompt tokens in the first frame of the first choice, and 0 later."""
        if self._cached_is_known or choice.index != self._first:
            return 0
        self._cached_is_known = True
        return self.usage.cached_tokens

    def _chunk(self, choice: _Choice, delta: ChoiceDelta) -> bytes:
        first = not choice.started
        choice.started = True
        usage = self._usage_so_far(choice)
        return self._renderer.chunk(
            Piece(
                choice.index,
                delta.text,
                first,
                delta.finish_reason,
                self._take_positions(choice),
                usage,
                delta.events,
                choice.output.parser is not None and choice.output.parser.has_complete_calls,
                choice.output.stop_reason,
                self._take_token_ids(choice),
                self._prompt.report() if first else PromptReport(),
            )
        )

    def _usage_so_far(self, choice: _Choice) -> Usage | None:
        """Return the usage for every chunk, if asked for: of the prompt and this choice, as vLLM counts it."""
        if not self.request.continuous_usage:
            return None
        return Usage(len(self.request.prompt_token_ids), choice.output.num_tokens)

    def last_frame(self) -> Frame:
        """Return the frame that ends an answer whose choices are all finished."""
        usage = self.usage
        only = next(iter(self._choices.values())).output
        meta = FrameMeta(
            last=True,
            usage=usage,
            queue_s=self._queue_s,
            num_text_chars=only.num_text_chars,
            position=only.num_tokens,
            finish_reason=only.finish_reason if not self.request.stream else None,
        )
        if self.request.stream:
            return Frame(meta, self._renderer.end(usage))
        return body_frame(meta, self._body(usage))

    def _body(self, usage: Usage) -> bytes | list[bytes]:
        report = self._prompt.report()
        choices = [
            FinishedChoice(
                index,
                choice.kept.text,
                choice.output.finish_reason or "abort",
                choice.kept.logprobs if self._reports_logprobs else None,
                choice.kept.events,
                choice.output.stop_reason,
                choice.kept.token_ids,
                report,
                self._first_token_s,
            )
            for index, choice in enumerate(self._chosen(), choice_index(self.request, 0))
            if choice.kept is not None
        ]
        return self._renderer.body(choices, usage)

    def _chosen(self) -> list[_Choice]:
        """Return the choices that the client gets, in order."""
        choices = list(self._choices.values())
        if not self._chooses:
            return choices
        return [choices[at] for at in best([choice.likelihood for choice in choices], self.request.sampling.n)]

    def _take_positions(self, choice: _Choice) -> list[logprobs.PositionLogprobs] | None:
        """Return the log probabilities to render now."""
        if not self._reports_logprobs:
            return None
        positions, choice.positions = choice.positions, []
        return positions

    def _position(self, entry: LogprobsOut, offset: int) -> logprobs.PositionLogprobs:
        num_top = self.request.sampling.num_alternatives or 0
        offset += len(self.request.prompt_text or "")
        return logprobs.position(self._tokenizer, entry.token_ids, entry.logprobs, num_top, offset)

    def _take_token_ids(self, choice: _Choice) -> list[int] | None:
        if not self.request.return_token_ids:
            return None
        token_ids, choice.token_ids = choice.token_ids, []
        return token_ids

    def _new_choice(self, index: int) -> _Choice:
        request = self.request
        resume = next((each for each in request.resume if each.index == index), None)
        output = ChoiceOutput(
            self._tokenizer, request.prompt_token_ids, request.sampling, resume, request.answer_format
        )
        choice = _Choice(output, index, started=False)
        if not request.stream:
            choice.kept = KeptChoice(self._renderer.collected_logprobs(of_prompt=False), request.return_token_ids)
        elif request.keeps_logprobs:
            choice.repeated = self._renderer.collected_logprobs(of_prompt=False)
        if resume is None:
            return choice
        if request.stream:
            choice.started = has_begun(resume, request)
            if choice.started:
                end = ChoiceEnd(output.finish_reason, output.stop_reason) if output.finish_reason is not None else None
                self._renderer.resume(index, output.delivered, end)
        elif choice.kept is not None:
            ended = (output.take_backlog(), output.take_events()) if resume.finished else ("", None)
            choice.kept.add(*ended, (), resume.token_ids)
        return choice


def body_frame(meta: FrameMeta, body: bytes | list[bytes]) -> Frame:
    """Return the frame of a body. A small one is a single piece."""
    pieces = [body] if isinstance(body, bytes) else body
    if sum(map(len, pieces)) <= PIECE_BYTES:
        return Frame(meta, b"".join(pieces))
    return Frame(meta, pieces[0], pieces[1:])


def failure_meta(error: PagemillError, usage: Usage) -> FrameMeta:
    """Return the meta of the frame that ends a request with `error`."""
    return FrameMeta(
        last=True,
        usage=usage,
        error=error.message,
        error_status=error.status,
        error_type=error.type,
        error_param=error.param,
        error_code=error.code,
    )


def engine_error(out: TokensOut) -> PagemillError:
    return PagemillError(
        out.error or "The engine failed on this request.",
        status=out.error_status,
        type=out.error_type,
        param=out.error_param,
        code=out.error_code,
        retry_after_s=out.error_retry_after_s,
    )


def is_large(output: TokensOut) -> bool:
    return len(output.token_ids) > PART_TOKENS or len(output.prompt_logprobs) > PART_TOKENS


def parts_of(output: TokensOut) -> Iterator[TokensOut]:
    """Yield the parts: first those that only report on the prompt, then the tokens, the last with the rest."""
    replace, report, token_ids = msgspec.structs.replace, output.prompt_logprobs, output.token_ids
    for at in range(0, len(report), PART_TOKENS):
        part = report[at : at + PART_TOKENS]
        yield replace(output, token_ids=[], logprobs=None, prompt_logprobs=part, finish_reason=None)
    for at in range(0, max(1, len(token_ids)), PART_TOKENS):
        end = at + PART_TOKENS
        yield replace(
            output,
            token_ids=token_ids[at:end],
            logprobs=None if output.logprobs is None else output.logprobs[at:end],
            prompt_logprobs=[],
            finish_reason=output.finish_reason if end >= len(token_ids) else None,
        )
