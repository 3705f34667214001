"""Turns one choice's token ids into text: detokenizes, finds stop strings, counts what was delivered.

The server feeds it `TokensOut`, the offline API the core's step outputs; it renders nothing. Tokens are processed one
at a time, so a stop string ends the choice exactly at the token that completed it: tokens that the engine had already
sampled beyond it (overshoot) reach neither text, usage nor log probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagemill_api.answers.events import Content, Event
from pagemill_api.answers.parser import AnswerParser
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.ipc.messages import LogprobsOut
from pagemill_engine.output.stops import StopMatcher
from pagemill_protocol.request.answer_format import AnswerFormat
from pagemill_protocol.request.generate import ChoiceResume, FinishReason
from pagemill_protocol.request.sampling import SamplingParams


class ChoiceDelta(NamedTuple):
    """The additions of one push. Every default means "nothing new"."""

    text: str = ""
    token_ids: Sequence[int] = ()
    """Tokens that count, in order; overshoot is left out."""
    logprobs: Sequence[LogprobsOut] = ()
    """One entry per token of `token_ids`, or none at all."""
    offsets: Sequence[int] = ()
    """For each token of `token_ids` the number of characters of the choice's text before it."""
    finish_reason: FinishReason | None = None
    events: Sequence[Event] | None = None
    """The parsed events of `text`; None without an answer format."""


class ChoiceOutput:
    """The state of one choice. `finish_reason` is set once; later pushes are ignored."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        resume: ChoiceResume | None = None,
        answer_format: AnswerFormat | None = None,
    ) -> None:
        self.num_tokens = 0
        """Number of tokens generated so far, including those before a resume: the sampler's position."""
        self.num_text_chars = 0
        """Number of characters delivered so far."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        """The stop string or stop token that ended the choice."""
        self.stopped_by_text = False
        """Whether the engine must be notified that a stop string ended this choice."""
        self._sampling = sampling
        self._stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else tokenizer.eos_token_ids)}
        self._detokenizer = tokenizer.detokenizer(prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens)
        self._matcher = StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
        self._backlog = ""
        self.parser = AnswerParser(answer_format) if answer_format is not None else None
        self.num_reasoning_tokens = 0
        self._offsets: list[int] = []
        self._events: list[Event] = []
        self.delivered: list[Event] = []
        """Events that the client received before a resume."""
        if resume is not None:
            self._replay(resume)

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[LogprobsOut] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> ChoiceDelta:
        """Process the engine's next tokens of this choice, and its finish reason once there is one."""
        if self.finish_reason is not None:
            return ChoiceDelta()
        pieces = [self._backlog]
        self._backlog = ""
        if self.stopped_by_text:  # found while replaying a resumed choice: it was not delivered to the client yet
            token_ids, finish_reason, self.finish_reason = (), None, "stop"
        taken = 0
        for taken, token_id in enumerate(token_ids, start=1):
            is_stop_token = finish_reason == "stop" and taken == len(token_ids) and self._may_be_stop_token(token_id)
            pieces.append(self._take(token_id, is_stop_token))
            if self.stopped_by_text:
                break
        if finish_reason is not None and not self.stopped_by_text:
            pieces.append(self._end(finish_reason))
        text = "".join(pieces)
        self.num_text_chars += len(text)
        self._end_events()
        offsets, self._offsets = self._offsets, []
        return ChoiceDelta(
            text, token_ids[:taken], (logprobs or ())[:taken], offsets, self.finish_reason, self.take_events()
        )

    def take_events(self) -> list[Event] | None:
        """Return the events since the last call; None without an answer format."""
        if self.parser is None:
            return None
        events, self._events = self._events, []
        return events

    def _take(self, token_id: int, is_stop_token: bool) -> str:
        self.num_tokens += 1
        self._offsets.append(self._detokenizer.start_of(token_id))
        reasons = self.parser is not None and self.parser.in_reasoning
        text = self._take_stop_token(token_id) if is_stop_token else self._scan(self._detokenizer.push([token_id]))
        self._read(text)
        if reasons or (self.parser is not None and self.parser.in_reasoning):
            self.num_reasoning_tokens += 1
        return text

    def _read(self, text: str) -> None:
        if self.parser is not None and text:
            self._events += self.parser.push(text)

    def _end_events(self) -> None:
        if self.parser is not None and self.finish_reason is not None:
            self._events += self.parser.finish()

    def _may_be_stop_token(self, token_id: int) -> bool:
        """Whether the last token may be a stop token. If the form ended the answer, its last token is text."""
        return self._sampling.structured_outputs is None or token_id in self._stop_ids

    def _take_stop_token(self, token_id: int) -> str:
        """Return the text of the stop token, which is empty unless the client asked for it."""
        if token_id in self._sampling.stop_token_ids:
            self.stop_reason = token_id
        if not self._sampling.include_stop_str_in_output:
            return ""
        return self._scan(self._detokenizer.push([token_id]))

    def _scan(self, text: str) -> str:
        """Return the text that is safe to deliver. Stop strings may end only after `min_tokens` tokens."""
        if not text:
            return text
        scanned = self._matcher.push(text, counts=self.num_tokens > self._sampling.min_tokens)
        if scanned.stop is not None:
            self.finish_reason = "stop"
            self.stop_reason = scanned.stop
            self.stopped_by_text = True
        return scanned.text

    def _end(self, finish_reason: FinishReason) -> str:
        """End the choice and return the text that detokenizer and matcher held back."""
        text = self._scan(self._detokenizer.flush())
        if self.stopped_by_text:
            self.stopped_by_text = False
        else:
            self.finish_reason = finish_reason
            text += self._matcher.flush()
        self._read(text)
        return text

    def _replay(self, resume: ChoiceResume) -> None:
        """Restore the state of the interrupted stream; text that was not delivered becomes backlog."""
        text = ""
        num_tokens = len(resume.token_ids)
        for taken, token_id in enumerate(resume.token_ids, start=1):
            is_stop_token = taken == num_tokens > self._sampling.min_tokens and token_id in self._stop_ids
            text += self._take(token_id, is_stop_token)
            if len(text) <= resume.num_text_chars:
                self.delivered += self.take_events() or ()
            if self.stopped_by_text:
                break
        if resume.finished:
            text += self._replay_end(resume.finish_reason or "stop")
            self._end_events()
            if len(text) <= resume.num_text_chars:
                self.delivered += self.take_events() or ()
        else:
            self.finish_reason = None
        self._offsets = []
        self._backlog = text[resume.num_text_chars :]
        if self.parser is None and resume.num_text_chars:
            self.delivered = [Content(text[: resume.num_text_chars])]
        self.num_text_chars = min(resume.num_text_chars, len(text))

    def _replay_end(self, finish_reason: FinishReason) -> str:
        if not self.stopped_by_text:
            return self._end(finish_reason)
        self.stopped_by_text = False  # the engine that runs the other choices does not have this one
        return ""

    def take_backlog(self) -> str:
        """Return the undelivered text, from before a resume, of a finished choice."""
        backlog, self._backlog = self._backlog, ""
        self.num_text_chars += len(backlog)
        return backlog
