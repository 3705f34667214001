"""Fits the step-time model to measured steps, and tracks how far the latest steps deviate from it.

The core measures steps and calls this; the model is `pagemill_protocol.step_time`, the deviation `step_drift`.
"""

from __future__ import annotations

import msgspec

from pagemill_engine.scheduler.step import StepPlan
from pagemill_protocol.state import EngineLoad
from pagemill_protocol.step_drift import StepDrift, drift_factor
from pagemill_protocol.step_time import StepTimeModel


class StepTimer:
    def __init__(self) -> None:
        self._drift = StepDrift()

    def observe(self, model: StepTimeModel, plan: StepPlan, ms: float, now_s: float) -> None:
        """Record that a step of `plan` took `ms` milliseconds."""
        usual_ms = self._drift.observe(predicted_ms(model, plan), ms, now_s, with_prompt=_has_prompt(plan))
        model.observe(plan.num_tokens, plan.decode_context_tokens, plan.chunk_context_products, usual_ms)

    def add_step_times(self, load: EngineLoad, model: StepTimeModel, plan: StepPlan | None, now_s: float) -> EngineLoad:
        """Return `load` with the current drift and the predicted time of `plan`, the step in flight."""
        drift = self._drift.value(now_s)
        in_flight_ms = 0.0
        if plan is not None:
            in_flight_ms = predicted_ms(model, plan) * drift_factor(drift, with_prompt=_has_prompt(plan))
        return msgspec.structs.replace(load, step_drift=drift, step_in_flight_ms=in_flight_ms)


def predicted_ms(model: StepTimeModel, plan: StepPlan) -> float:
    return model.predict_ms(plan.num_tokens, plan.decode_context_tokens, plan.chunk_context_products)


def _has_prompt(plan: StepPlan) -> bool:
    return plan.chunk_context_products > 0
