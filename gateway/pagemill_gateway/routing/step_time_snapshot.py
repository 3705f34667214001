"""The durations of a pod's steps with its current load: computed once per report, read by every decision."""

from __future__ import annotations

from typing import NamedTuple

from pagemill_protocol.step_time import StepTimeModel

DEFAULT_STEP_TOKENS = 512
"""Token budget of a step where the pod has not reported it."""


class StepTimeSnapshot(NamedTuple):
    model: StepTimeModel
    num_running: int
    num_context_tokens: int
    """Of the running requests."""
    budget: int
    """Prompt tokens that fit into a step beside the running requests."""
    decode_ms: float
    """A step of the running requests and one more."""
    full_ms: float
    """A step whose budget is used up."""

    def step_ms(self, num_prompt_tokens: int, products: float = 0.0) -> float:
        """A step of the running requests and this many prompt tokens; `products`: the sum of chunk x context."""
        return self.model.predict_ms(self.num_running + num_prompt_tokens, self.num_context_tokens, int(products))


def take_snapshot(
    model: StepTimeModel, max_step_tokens: int, num_running: int, num_context_tokens: int
) -> StepTimeSnapshot:
    budget = max(1, (max_step_tokens or DEFAULT_STEP_TOKENS) - num_running)
    return StepTimeSnapshot(
        model=model,
        num_running=num_running,
        num_context_tokens=num_context_tokens,
        budget=budget,
        decode_ms=model.predict_ms(num_running + 1, num_context_tokens),
        full_ms=model.predict_ms(num_running + budget, num_context_tokens),
    )
