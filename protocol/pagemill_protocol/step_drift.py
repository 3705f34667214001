"""How far an engine's latest steps are off the law that it learnt from hundreds.

A machine is slower for seconds at a time: its neighbours use the memory, its clock falls. The law is of the long run
(`pagemill_protocol.step_time`) and does not follow: it learns from steps out of which such a phase is taken, so that
it is not blurred by it either. Who asks when the next step ends multiplies it by `drift_factor`. The engine observes
and publishes one number, the gateway reads it.

Measured on a virtual machine with a core of its own: residuals of neighbouring steps correlate with 0.89, those 16
steps apart with 0.42. Steps with prompt tokens compute more and wait less for memory: half of the drift was theirs.
"""

from __future__ import annotations

import math

GAIN = 0.4
"""Weight of the latest step."""
USUAL_GAIN = 0.005
"""The same for what is usual: a memory of some 200 steps."""
FORGOTTEN_S = 5.0
"""Without steps the law alone counts again, after a few of these."""
PROMPT_SHARE = 0.5
"""Of the drift, in the logarithm, in steps with prompt tokens."""
_LARGEST = 0.7
"""Of one step: what is further off than twice or half is an accident."""


def drift_factor(drift: float, *, with_prompt: bool) -> float:
    """What a predicted step is to be multiplied by. `drift` is a logarithm; 0: as the law says."""
    return math.exp(drift * PROMPT_SHARE if with_prompt else drift)


class StepDrift:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._drift = 0.0
        self._at_s = 0.0
        self._num_observed = 0
        self._usual = 0.0
        """Drift in the long run: the law is too short or too long, and is to learn it."""

    def value(self, now_s: float) -> float:
        return self._drift * math.exp(-max(0.0, now_s - self._at_s) / FORGOTTEN_S) if self._drift else 0.0

    def observe(self, predicted_ms: float, ms: float, now_s: float, *, with_prompt: bool) -> float:
        """A step ended that the law had said would take `predicted_ms`. Returns `ms` as it were outside this phase."""
        if not (predicted_ms > 0 and 0 < ms < math.inf):
            return ms
        share, before = PROMPT_SHARE if with_prompt else 1.0, self.value(now_s)
        residual = min(_LARGEST, max(-_LARGEST, math.log(ms) - math.log(predicted_ms)))
        self._num_observed += 1
        self._usual += max(USUAL_GAIN, 1 / self._num_observed) * (before - self._usual)
        # What shows half of it says half as much of it.
        self._drift, self._at_s = before + GAIN * share * (residual - share * before), now_s
        return ms / drift_factor(before - self._usual, with_prompt=with_prompt)
