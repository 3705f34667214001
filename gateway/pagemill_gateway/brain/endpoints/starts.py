"""How much longer a deployment without an engine has to wait for one, learned from how long it took before. Pure.

The time counts from the first request that found no engine, which is when one is ordered where somebody scales from
zero, to the first report of an engine that serves. Coming from nothing and coming back are learned apart: a pod that
has to be scheduled takes longer than a container that is started again. Before either has happened, what engines told
of their own starts has to do. Times come from outside.
"""

from __future__ import annotations

from collections import deque
from statistics import median

REMEMBERED = 5
LAPSE_S = 300.0
"""A wish that nobody has repeated for this long is forgotten, and who asks then asks anew."""
LEAST_LEFT_S = 1.0


class Starts:
    def __init__(self) -> None:
        self._took_s: dict[bool, deque[float]] = {anew: deque(maxlen=REMEMBERED) for anew in (True, False)}
        self._told_s: float | None = None
        self._wished_at: float | None = None
        self._latest_wish_at = 0.0
        self._anew = False

    def told(self, start_s: dict[str, float]) -> None:
        """What an engine says of its own start, by phase."""
        if start_s:
            self._told_s = sum(start_s.values())

    def wished(self, now: float, *, anew: bool) -> None:
        """Somebody needs an engine and none serves; `anew`: nor is one known that could come back."""
        if self._wished_at is None or now - self._latest_wish_at > LAPSE_S:
            self._wished_at, self._anew = now, anew
        self._latest_wish_at = now

    def served(self, now: float) -> None:
        """An engine serves."""
        if self._wished_at is not None and now - self._latest_wish_at <= LAPSE_S:
            self._took_s[self._anew].append(now - self._wished_at)
        self._wished_at = None

    def usual_s(self, *, anew: bool) -> float | None:
        """What a start takes; `None`: nothing is learned."""
        took_s = self._took_s[anew]
        return median(took_s) if took_s else self._told_s

    def left_s(self, now: float) -> float | None:
        """Until an engine serves that was wished for, or is now; `None`: nothing is learned."""
        expected_s = self.usual_s(anew=self._anew)
        if expected_s is None:
            return None
        waited_s = now - self._wished_at if self._wished_at is not None else 0.0
        # What is late already may well be late as much again.
        return max(LEAST_LEFT_S, abs(expected_s - waited_s))
