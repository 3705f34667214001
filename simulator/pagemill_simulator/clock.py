"""A clock whose time passes only when something waits: an hour of traffic takes only the seconds of its decisions."""

from __future__ import annotations


class VirtualClock:
    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Advance the time, instead of `time.sleep`."""
        if seconds > 0:
            self._now_s += seconds

    def advance_to(self, instant_s: float) -> None:
        self._now_s = max(self._now_s, instant_s)
