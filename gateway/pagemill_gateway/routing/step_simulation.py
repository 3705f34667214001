"""Simulates the next steps of an engine from its latest report, to predict the first token of a request.

The simulation follows the engine's loop and scheduler. Each step takes the running answers, then prompt tokens, first
come, first served, within the token budget. An engine with overlap schedules a step when the previous one begins, so a
request that arrives during a step is not in the next one but in the one after it. The pod's step-time model gives the
durations.

Answers do not end in the simulation: their last tokens are unknown, and few end in the few steps between two reports.
The caller adds the waits for sequence slots and blocks. Pure; `brain.endpoints.ttft_estimator` maps it to decisions.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from pagemill_protocol.step_drift import drift_factor
from pagemill_protocol.step_time import StepTimeModel

FEW_STEPS = 4
"""With more steps of decodes only, most of them are simulated at once."""
MAX_STEPS = 512
"""Limit for the steps of one simulation; the rest of a prompt counts as full steps."""


class PendingPrompt(NamedTuple):
    """A prompt whose tokens wait for steps."""

    at_s: float
    """Arrival at the engine; steps that are scheduled from then on may take it."""
    num_tokens: int
    num_context_tokens: int = 0
    """Tokens that are computed or cached."""
    num_answers: int = 1
    """Sequences that run after the prompt is computed; 0 if they are already counted."""


class StepSimulation:
    """The steps of an engine from now on. All times are seconds of the gateway's clock."""

    def __init__(self, model: StepTimeModel, max_step_tokens: int, *, overlaps: bool, drift: float = 0.0) -> None:
        """`drift`: the deviation of the engine's latest steps from its model."""
        self._model = model
        self._decode_factor = drift_factor(drift, with_prompt=False)
        self._prompt_factor = drift_factor(drift, with_prompt=True)
        self._max_step_tokens = max_step_tokens
        self._overlaps = overlaps
        self.num_answers = 0
        """The number of running sequences, which take one token of every step."""
        self.num_context_tokens = 0
        """The context tokens of the running sequences."""
        self.queue: deque[PendingPrompt] = deque()
        self._end_s: float | None = None
        """The end of the running step; `None` if none runs."""
        self._next_ms = 0.0
        """The duration of the next scheduled step; 0 if there is none."""
        self._first_token_s = 0.0
        """The first token of the last prompt of the queue; valid when the queue is empty."""

    def begin(self, now_s: float, running_ms: float, until_s: float) -> None:
        """Begin with a step from `now_s` on that takes `running_ms`; 0: the step is scheduled now.

        The step does not end before `until_s`.
        """
        if running_ms > 0:
            self._end_s = now_s + running_ms / 1000
            self._decide_next(now_s)
        else:
            self._start(now_s)
        if self._end_s is not None:
            self._end_s = max(self._end_s, until_s)

    def advance(self, now_s: float) -> None:
        """Simulate all steps that end before `now_s`."""
        for _ in range(MAX_STEPS):
            if self._end_s is None:
                if not self.queue or self.queue[0].at_s > now_s:
                    return
                self._start(self.queue[0].at_s)
            elif self._end_s > now_s:
                return
            else:
                self._skip_decodes(now_s)
                self._step(self._end_s)
        self._end_s = now_s

    def _skip_decodes(self, now_s: float) -> None:
        """Simulate nearly all steps before `now_s` at once, if no prompt waits: their durations grow linearly."""
        if self.queue or not self.num_answers or self._end_s is None or (self._overlaps and not self._next_ms):
            return
        left_ms, first_ms = (now_s - self._end_s) * 1000 - self._next_ms, self._decode_ms(0)
        if not 0 < FEW_STEPS * first_ms < left_ms:
            return
        num_steps = int(left_ms / self._decode_ms(int(left_ms / first_ms)))
        self._end_s += (self._next_ms + num_steps * (first_ms + self._decode_ms(num_steps - 1)) / 2) / 1000
        self._next_ms = self._decode_ms(num_steps) if self._overlaps else 0.0
        # With overlap, one more step was scheduled than has ended.
        self.num_context_tokens += (num_steps + self._overlaps) * self.num_answers

    def _decode_ms(self, num_steps: int) -> float:
        """Return the duration of the step after this many steps of decodes."""
        num_context_tokens = self.num_context_tokens + num_steps * self.num_answers
        return self._decode_factor * self._model.predict_ms(self.num_answers, num_context_tokens)

    def first_token_s(self, pending: PendingPrompt) -> float:
        """Return the time of the prompt's first token, if it is added to the queue's end. Changes nothing."""
        copy = self._copy()
        copy.advance(pending.at_s)
        copy.queue.append(pending)
        for _ in range(MAX_STEPS):
            if copy._end_s is None:
                copy._start(copy.queue[0].at_s)
            else:
                copy._step(copy._end_s)
            if not copy.queue:
                return copy._first_token_s
        return copy._remainder_s()

    def _copy(self) -> StepSimulation:
        copy = StepSimulation.__new__(StepSimulation)
        copy._model, copy._max_step_tokens, copy._overlaps = self._model, self._max_step_tokens, self._overlaps
        copy._decode_factor, copy._prompt_factor = self._decode_factor, self._prompt_factor
        copy.num_answers, copy.num_context_tokens = self.num_answers, self.num_context_tokens
        copy.queue = self.queue.copy()
        copy._end_s, copy._next_ms, copy._first_token_s = self._end_s, self._next_ms, self._first_token_s
        return copy

    def _start(self, now_s: float) -> None:
        """Begin a step with the waiting prompts while none runs."""
        had_queue, step_ms = bool(self.queue), self._decide(now_s)
        self._end_s, self._next_ms = None, 0.0
        if not step_ms:
            return
        self._end_s = now_s + step_ms / 1000
        if had_queue and not self.queue:
            self._first_token_s = self._end_s
        self._decide_next(now_s)

    def _step(self, now_s: float) -> None:
        """End the running step, and begin the next one."""
        if not self._next_ms:
            self._start(now_s)
            return
        self._end_s = now_s + self._next_ms / 1000
        self._decide_next(now_s)

    def _decide_next(self, now_s: float) -> None:
        """Schedule the next step while the one that just began runs."""
        if not self._overlaps:
            return
        assert self._end_s is not None
        had_queue = bool(self.queue)
        self._next_ms = self._decide(now_s)
        if had_queue and not self.queue:
            self._first_token_s = self._end_s + self._next_ms / 1000

    def _decide(self, now_s: float) -> float:
        """Fill a step with running answers and waiting prompts, and return its duration; 0 if there are none."""
        num_tokens, num_context_tokens, products = self.num_answers, self.num_context_tokens, 0
        budget, queue = self._max_step_tokens - num_tokens, self.queue
        self.num_context_tokens += num_tokens
        while queue and budget > 0 and queue[0].at_s <= now_s:
            pending = queue[0]
            chunk = min(budget, pending.num_tokens)
            context = pending.num_context_tokens + chunk
            num_tokens, budget, products = num_tokens + chunk, budget - chunk, products + chunk * context
            if chunk < pending.num_tokens:
                queue[0] = pending._replace(num_tokens=pending.num_tokens - chunk, num_context_tokens=context)
            else:
                queue.popleft()
                self.num_answers += pending.num_answers
                self.num_context_tokens += context if pending.num_answers else 0
        if not num_tokens:
            return 0.0
        factor = self._prompt_factor if products else self._decode_factor
        return factor * self._model.predict_ms(num_tokens, num_context_tokens, products)

    def _remainder_s(self) -> float:
        """Return the end of a queue that is longer than the simulation, with full steps for its tokens."""
        num_left = sum(pending.num_tokens for pending in self.queue)
        num_steps = 1 + num_left // max(1, self._max_step_tokens - self.num_answers)
        full_ms = self._model.predict_ms(self._max_step_tokens, self.num_context_tokens)
        return (self._end_s or 0.0) + num_steps * full_ms / 1000
