"""The durations of a pod's steps with its current load, computed once per report."""

from __future__ import annotations

import msgspec

from pagemill_protocol.report.step_time import StepTimeModel

DEFAULT_STEP_TOKENS = 512
"""The token budget of a step if the pod has not reported it."""


class StepTimeSnapshot(msgspec.Struct, frozen=True, gc=False):
    model: StepTimeModel
    num_decode_tokens: int
    """The tokens that the running requests compute in a step, proposed ones included."""
    num_context_tokens: int
    """The context tokens of the running requests."""
    budget: int
    """The prompt tokens that fit into a step with the running requests."""
    decode_ms: float
    """The duration of a step of the running requests and another one."""
    full_ms: float
    """The duration of a step whose budget is used up."""

    def step_ms(self, num_prompt_tokens: int, products: float = 0.0) -> float:
        """Return the duration of a step with the running requests and this many prompt tokens.

        `products` is the sum of chunk x context.
        """
        return self.model.predict_ms(self.num_decode_tokens + num_prompt_tokens, self.num_context_tokens, int(products))


def take_snapshot(
    model: StepTimeModel, max_step_tokens: int, num_running: int, num_context_tokens: int
) -> StepTimeSnapshot:
    computed = model.computed_per_decode
    num_decode_tokens = round(num_running * computed)
    budget = max(1, (max_step_tokens or DEFAULT_STEP_TOKENS) - num_decode_tokens)
    return StepTimeSnapshot(
        model=model,
        num_decode_tokens=num_decode_tokens,
        num_context_tokens=num_context_tokens,
        budget=budget,
        decode_ms=model.predict_ms(round((num_running + 1) * computed), num_context_tokens) + model.draft_ms,
        full_ms=model.predict_ms(num_decode_tokens + budget, num_context_tokens),
    )
