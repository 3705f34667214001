"""How long each phase of a start takes: one ends where the next begins, and one that comes again adds up.

Neighbours: `process` enters the phases; the state stream tells them, so that cold starts can be seen by phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOAD, WARM, FIRST_TOKEN = "load", "warm", "first_token"
_OF_PROGRESS = {"warming": WARM, "first_token": FIRST_TOKEN}
"""Everything else that a start reports belongs to the load."""


class StartClock:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase, self._since_s = LOAD, clock()
        self._seconds: dict[str, float] = {}

    def progress(self, phase: str) -> None:
        """The start reports this phase (`LoadProgress`)."""
        self._enter(_OF_PROGRESS.get(phase, LOAD))

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds until now."""
        self._enter(self._phase)
        return {phase: round(seconds, 3) for phase, seconds in self._seconds.items()}

    def _enter(self, phase: str) -> None:
        now_s = self._clock()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now_s - self._since_s
        self._phase, self._since_s = phase, now_s
