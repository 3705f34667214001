"""How far an engine's latest steps deviate from its step-time model.

A machine can be slower for seconds at a time: neighbours use the memory, the clock falls. The model covers the long run
(`pagemill_protocol.step_time`) and does not follow such phases: it learns from steps with the drift removed, so that it
stays sharp. Predictions of the next steps are multiplied by `drift_factor`. The engine measures and publishes one
number; the gateway reads it.

Measured on a virtual machine with a core of its own: residuals of neighbouring steps correlate with 0.89, those 16
steps apart with 0.42. Steps with prompt tokens compute more and wait less for memory: half of the drift affects them.
"""

from __future__ import annotations

import math

GAIN = 0.4
"""Weight of the latest step."""
USUAL_GAIN = 0.005
"""Weight of the latest step in the long-run drift: a memory of about 200 steps."""
FORGOTTEN_S = 5.0
"""Without steps the drift decays; after a few times this the model alone counts."""
PROMPT_SHARE = 0.5
"""Share of the drift, in the logarithm, that affects steps with prompt tokens."""
_LARGEST = 0.7
"""Bound for one step: a deviation beyond half or double is an outlier."""


def drift_factor(drift: float, *, with_prompt: bool) -> float:
    """The factor for a predicted step. `drift` is a logarithm; 0: no drift."""
    return math.exp(drift * PROMPT_SHARE if with_prompt else drift)


class StepDrift:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._drift = 0.0
        self._at_s = 0.0
        self._num_observed = 0
        self._usual = 0.0
        """Long-run drift: the model itself is off and has to learn it."""

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
        # A step that is affected by half of the drift also measures it half as well.
        self._drift, self._at_s = before + GAIN * share * (residual - share * before), now_s
        return ms / drift_factor(before - self._usual, with_prompt=with_prompt)
