"""What steps take here: the law that the engine learns from them, and how far the latest ones are off it.

Between the core, which measures steps, and `pagemill_protocol.step_time` and `step_drift`, which know no plan.
"""

from __future__ import annotations

import msgspec

from pagemill_engine.scheduler.step import StepPlan
from pagemill_protocol.state import EngineLoad
from pagemill_protocol.step_drift import StepDrift, drift_factor
from pagemill_protocol.step_time import StepTimeModel


class Pace:
    def __init__(self) -> None:
        self._drift = StepDrift()

    def observe(self, law: StepTimeModel, plan: StepPlan, ms: float, now_s: float) -> None:
        """A step of `plan` ended that took `ms`."""
        usual_ms = self._drift.observe(_predicted_ms(law, plan), ms, now_s, with_prompt=_has_prompt(plan))
        law.observe(plan.num_tokens, plan.decode_context_tokens, plan.chunk_context_products, usual_ms)

    def told(self, load: EngineLoad, law: StepTimeModel, plan: StepPlan | None, now_s: float) -> EngineLoad:
        """`load` with the drift, and with what the step takes that began just now; `plan`: its own."""
        drift = self._drift.value(now_s)
        in_flight_ms = 0.0
        if plan is not None:
            in_flight_ms = _predicted_ms(law, plan) * drift_factor(drift, with_prompt=_has_prompt(plan))
        return msgspec.structs.replace(load, step_drift=drift, step_in_flight_ms=in_flight_ms)


def _predicted_ms(law: StepTimeModel, plan: StepPlan) -> float:
    return law.predict_ms(plan.num_tokens, plan.decode_context_tokens, plan.chunk_context_products)


def _has_prompt(plan: StepPlan) -> bool:
    return plan.chunk_context_products > 0
