"""Time that passes only when something waits: an hour of traffic takes the seconds its decisions cost."""

from __future__ import annotations


class VirtualClock:
    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Takes the place of `time.sleep`."""
        if seconds > 0:
            self._now_s += seconds

    def advance_to(self, instant_s: float) -> None:
        self._now_s = max(self._now_s, instant_s)
