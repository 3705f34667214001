"""What an engine will do step by step, played forward from what it told: when does a request have its first token?

The play follows the engine's loop and scheduler. Each step takes the running answers, then prompt tokens first come,
first served, until its budget is used up. An engine that overlaps decides a step when the one before it begins, so who
comes while a step runs is not in the next one but in the one after. How long a step takes says the pod's own law.

Answers do not end in here: which token is the last one nobody knows, and in the few steps between two reports hardly
any is. Seats and blocks are not played either: whoever asks adds the wait for those. Pure; it knows no decision
(`brain.endpoints.ttft_estimator` does) and no policy.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from pagemill_protocol.step_drift import drift_factor
from pagemill_protocol.step_time import StepTimeModel

MAX_STEPS = 512
"""More are not played, forward or to catch up: the rest of a prompt counts as full steps like the last one."""


class PendingPrompt(NamedTuple):
    """Prompt tokens that wait for their steps."""

    at_s: float
    """When the engine has it; steps decided from then on may take it."""
    num_tokens: int
    num_context_tokens: int = 0
    """Computed already, or cached."""
    num_answers: int = 1
    """That run once its prompt is through; 0: counted already."""


class StepSimulation:
    """An engine's steps from now on. All times are the reader's clock, in seconds."""

    def __init__(self, model: StepTimeModel, max_step_tokens: int, *, overlaps: bool, drift: float = 0.0) -> None:
        """`drift`: how far the engine's latest steps were off its model."""
        self._model = model
        self._decode_factor = drift_factor(drift, with_prompt=False)
        self._prompt_factor = drift_factor(drift, with_prompt=True)
        self._max_step_tokens = max_step_tokens
        self._overlaps = overlaps
        self.num_answers = 0
        """Rows that take a token of every step."""
        self.num_context_tokens = 0
        """What those read."""
        self.queue: deque[PendingPrompt] = deque()
        self._end_s: float | None = None
        """Of the step that runs; `None`: none does."""
        self._next_ms = 0.0
        """How long the step takes that was decided behind it; 0: none was."""
        self._through_s = 0.0
        """When the prompt that was last in the queue is through, once the queue is empty."""

    def begin(self, now_s: float, running_ms: float, until_s: float) -> None:
        """A step began at `now_s` that takes `running_ms`; 0: it is decided now. By `until_s` it has not ended."""
        if running_ms > 0:
            self._end_s = now_s + running_ms / 1000
            self._decide_next(now_s)
        else:
            self._start(now_s)
        if self._end_s is not None:
            self._end_s = max(self._end_s, until_s)

    def advance(self, now_s: float) -> None:
        """Play all steps that end before `now_s`."""
        for _ in range(MAX_STEPS):
            if self._end_s is None:
                if not self.queue or self.queue[0].at_s > now_s:
                    return
                self._start(self.queue[0].at_s)
            elif self._end_s > now_s:
                return
            else:
                self._step(self._end_s)
        self._end_s = now_s

    def through_s(self, coming: PendingPrompt) -> float:
        """When this prompt has its first token, if it comes behind all others. Changes nothing."""
        play = self._copy()
        play.advance(coming.at_s)
        play.queue.append(coming)
        for _ in range(MAX_STEPS):
            if play._end_s is None:
                play._start(play.queue[0].at_s)
            else:
                play._step(play._end_s)
            if not play.queue:
                return play._through_s
        return play._rest_s()

    def _copy(self) -> StepSimulation:
        play = StepSimulation.__new__(StepSimulation)
        play._model, play._max_step_tokens, play._overlaps = self._model, self._max_step_tokens, self._overlaps
        play._decode_factor, play._prompt_factor = self._decode_factor, self._prompt_factor
        play.num_answers, play.num_context_tokens = self.num_answers, self.num_context_tokens
        play.queue = self.queue.copy()
        play._end_s, play._next_ms, play._through_s = self._end_s, self._next_ms, self._through_s
        return play

    def _start(self, now_s: float) -> None:
        """No step runs: one begins with who is there."""
        had_queue, step_ms = bool(self.queue), self._decide(now_s)
        self._end_s, self._next_ms = None, 0.0
        if not step_ms:
            return
        self._end_s = now_s + step_ms / 1000
        if had_queue and not self.queue:
            self._through_s = self._end_s
        self._decide_next(now_s)

    def _step(self, now_s: float) -> None:
        """The step that runs ends; the one decided behind it begins."""
        if not self._next_ms:
            self._start(now_s)
            return
        self._end_s = now_s + self._next_ms / 1000
        self._decide_next(now_s)

    def _decide_next(self, now_s: float) -> None:
        """While the step that began just now runs."""
        if not self._overlaps:
            return
        assert self._end_s is not None
        had_queue = bool(self.queue)
        self._next_ms = self._decide(now_s)
        if had_queue and not self.queue:
            self._through_s = self._end_s + self._next_ms / 1000

    def _decide(self, now_s: float) -> float:
        """Fill a step with what is there; how long it takes."""
        num_tokens, num_context_tokens, products = self.num_answers, self.num_context_tokens, 0
        budget, queue = self._max_step_tokens - num_tokens, self.queue
        self.num_context_tokens += num_tokens
        while queue and budget > 0 and queue[0].at_s <= now_s:
            coming = queue[0]
            chunk = min(budget, coming.num_tokens)
            context = coming.num_context_tokens + chunk
            num_tokens, budget, products = num_tokens + chunk, budget - chunk, products + chunk * context
            if chunk < coming.num_tokens:
                queue[0] = coming._replace(num_tokens=coming.num_tokens - chunk, num_context_tokens=context)
            else:
                queue.popleft()
                self.num_answers += coming.num_answers
                self.num_context_tokens += context if coming.num_answers else 0
        if not num_tokens:
            return 0.0
        factor = self._prompt_factor if products else self._decode_factor
        return factor * self._model.predict_ms(num_tokens, num_context_tokens, products)

    def _rest_s(self) -> float:
        """Of a queue that is longer than anybody plays: as many full steps as its tokens need."""
        num_left = sum(coming.num_tokens for coming in self.queue)
        num_steps = 1 + num_left // max(1, self._max_step_tokens - self.num_answers)
        full_ms = self._model.predict_ms(self._max_step_tokens, self.num_context_tokens)
        return (self._end_s or 0.0) + num_steps * full_ms / 1000
