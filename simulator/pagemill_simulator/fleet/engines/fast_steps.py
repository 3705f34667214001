"""Durations of steps, singly or many equal ones at once, which of many runs at an instant, and one that is decided.

The step-time model is `report.step_time` of the protocol. Steps that decode the same requests differ only in their
contexts, which grow by a token per request: the end of k such steps is a quadratic in k, and its inverse gives how many
of them begin before an instant. All times here are in seconds.
"""

from __future__ import annotations

import math

import msgspec

from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_simulator.fleet.engines.fast_sequence import FastSequence


class StepTimes:
    def __init__(self, params: StepTimeParams, max_step_tokens: int) -> None:
        model = StepTimeModel.from_params(params)
        fitted = model.params()
        self.model = model
        # One more than the longest step, because the effect of one more request on a full step is also computed.
        self.base_ms = [model.predict_ms(num_tokens) for num_tokens in range(max_step_tokens + 2)]
        """Milliseconds of a step by number of tokens, without contexts."""
        self.base_s = [ms / 1000 for ms in self.base_ms]
        self.decode_context_s = fitted.decode_context_ms / 1000
        self.chunk_context_s = fitted.chunk_context_ms / 1000

    def step_s(self, num_tokens: int, num_context_tokens: int, products: int) -> float:
        """Return what `StepTimeModel.predict_ms` returns, in seconds and for at least one token."""
        base_s = self.base_s[num_tokens]
        return base_s + self.decode_context_s * num_context_tokens + self.chunk_context_s * products

    def run_of(self, num_rows: int, num_context_tokens: int, begin_s: float) -> StepRun:
        """Return the run of decode steps; `num_context_tokens` is what the first step reads."""
        first_s = self.base_s[num_rows] + self.decode_context_s * num_context_tokens
        return StepRun(begin_s, first_s, self.decode_context_s * num_rows)


class StepRun(msgspec.Struct, frozen=True, gc=False):
    """Successive steps, each longer than the previous one by the same time."""

    begin_s: float
    first_s: float
    growth_s: float

    def end_s(self, num_steps: int) -> float:
        """Return the end of the first `num_steps` steps."""
        return self.begin_s + num_steps * self.first_s + self.growth_s * (num_steps * (num_steps - 1) // 2)

    def num_ended_before(self, instant_s: float, most: int) -> int:
        """Return how many steps end before the instant, at most `most`."""
        left_s = instant_s - self.begin_s
        if left_s <= 0 or self.end_s(most) < instant_s:
            return 0 if left_s <= 0 else most
        # Solve first n + growth n (n - 1) / 2 = left, in the form of the root that does not cancel.
        linear = self.first_s - self.growth_s / 2
        divisor = linear + math.sqrt(linear * linear + 2 * self.growth_s * left_s)
        found = min(most, int(2 * left_s / divisor)) if divisor > 0 else most
        # Rounding may be off by one; the result must agree with `end_s`.
        while found > 0 and self.end_s(found) >= instant_s:
            found -= 1
        while found < most and self.end_s(found + 1) < instant_s:
            found += 1
        return found


class OpenStep:
    """One step while it is decided."""

    __slots__ = ("budget", "chunks", "num_context_tokens", "num_reserved_blocks", "products")

    def __init__(self, budget: int, num_context_tokens: int) -> None:
        self.budget = budget
        self.num_context_tokens = num_context_tokens
        """Sum over decodes."""
        self.products = 0
        """Sum over chunks of tokens times context."""
        self.num_reserved_blocks = 0
        self.chunks: list[tuple[FastSequence, int]] = []

    def count(self, row: FastSequence, num_tokens: int, sign: int) -> None:
        """Add or remove a chunk of a prompt; a single due token counts as a decode's."""
        num_context_tokens = row.num_computed_tokens + num_tokens
        self.budget -= sign * num_tokens
        if row.num_due_tokens == 1:
            self.num_context_tokens += sign * num_context_tokens
        else:
            self.products += sign * num_tokens * num_context_tokens
