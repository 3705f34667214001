"""Measures the phases of a start. A phase ends where the next begins; times of a repeated phase are added.

`process` enters the phases; the state stream publishes them, so that cold starts can be analysed by phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOAD, WARM, FIRST_TOKEN = "load", "warm", "first_token"
_PHASE_OF_PROGRESS = {"warming": WARM, "first_token": FIRST_TOKEN}
"""Phases of progress reports. All other reports belong to the load phase."""


class StartClock:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase, self._since_s = LOAD, clock()
        self._seconds: dict[str, float] = {}

    def progress(self, phase: str) -> None:
        """Record a progress report of the start (`LoadProgress`)."""
        self._enter(_PHASE_OF_PROGRESS.get(phase, LOAD))

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each phase until now."""
        self._enter(self._phase)
        return {phase: round(seconds, 3) for phase, seconds in self._seconds.items()}

    def _enter(self, phase: str) -> None:
        now_s = self._clock()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now_s - self._since_s
        self._phase, self._since_s = phase, now_s
