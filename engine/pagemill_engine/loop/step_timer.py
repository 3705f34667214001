"""Fits the step-time model to measured steps, and tracks how far the latest steps deviate from it.

A machine can be slower for seconds at a time: other virtual machines use the memory, the clock rate falls. The model
(`report.step_time` of the protocol) describes the long run and does not follow such phases: it learns from steps with
the drift removed, so that it stays accurate. The core measures steps and calls this module.

Measured on a virtual machine with a core of its own: residuals of consecutive steps correlate with 0.89, those 16 steps
apart with 0.42. Steps with prompt tokens are more bound by computation than by memory: half of the drift affects them.
"""

from __future__ import annotations

import math

from pagemill_execution.step import StepPlan
from pagemill_protocol.report.step_time import StepTimeModel

GAIN = 0.4
"""Weight of the latest step."""
USUAL_GAIN = 0.005
"""Weight of the latest step in the long-run drift: a memory of about 200 steps."""
FORGOTTEN_S = 5.0
"""Time constant in seconds with which the drift decays without steps."""
PROMPT_SHARE = 0.5
"""Share of the drift, as a logarithm, that affects steps with prompt tokens."""
_LARGEST = 0.7
"""Bound on one step's logarithmic deviation: beyond half or double it is an outlier."""


def drift_factor(drift: float, *, with_prompt: bool) -> float:
    """Return the factor for a predicted step. `drift` is a logarithm; 0: no drift."""
    return math.exp(drift * PROMPT_SHARE if with_prompt else drift)


class StepDrift:
    """Running estimate of the drift. Not thread-safe."""

    def __init__(self) -> None:
        self._drift = 0.0
        self._at_s = 0.0
        self._num_observed = 0
        self._usual = 0.0
        """Long-run drift: an error of the model itself, which the model must learn."""

    def value(self, now_s: float) -> float:
        return self._drift * math.exp(-max(0.0, now_s - self._at_s) / FORGOTTEN_S) if self._drift else 0.0

    def observe(self, predicted_ms: float, ms: float, now_s: float, *, with_prompt: bool) -> float:
        """Record a step that was predicted to take `predicted_ms`. Returns `ms` without the drift of the current
        phase."""
        if not (predicted_ms > 0 and 0 < ms < math.inf):
            return ms
        share, before = PROMPT_SHARE if with_prompt else 1.0, self.value(now_s)
        residual = min(_LARGEST, max(-_LARGEST, math.log(ms) - math.log(predicted_ms)))
        self._num_observed += 1
        self._usual += max(USUAL_GAIN, 1 / self._num_observed) * (before - self._usual)
        # A step that only half of the drift affects measures it half as well.
        self._drift, self._at_s = before + GAIN * share * (residual - share * before), now_s
        return ms / drift_factor(before - self._usual, with_prompt=with_prompt)


class StepTimer:
    def __init__(self) -> None:
        self._drift = StepDrift()

    def observe(self, model: StepTimeModel, plan: StepPlan, ms: float, now_s: float) -> None:
        """Record that a step of `plan` took `ms` milliseconds."""
        usual_ms = self._drift.observe(predicted_ms(model, plan), ms, now_s, with_prompt=_has_prompt(plan))
        model.observe(plan.num_tokens, plan.decode_context_tokens, plan.chunk_context_products, usual_ms)


def predicted_ms(model: StepTimeModel, plan: StepPlan) -> float:
    return model.predict_ms(plan.num_tokens, plan.decode_context_tokens, plan.chunk_context_products)


def _has_prompt(plan: StepPlan) -> bool:
    return plan.chunk_context_products > 0
