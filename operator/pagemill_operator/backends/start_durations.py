"""Learns how long replicas take from the order to readiness, from observed starts. Pure functions of what is observed.

`scaler` passes the duration to scaling policies as the cold start; `controller.cold_starts` measures each start's
phases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pagemill_operator.status.observation import ReplicaObservation

NUM_KEPT_STARTS = 8
CAREFUL = 0.75
"""Quantile of the remembered starts that `learned_s` returns."""


class StartDurations:
    """The starts of one deployment's replicas."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._known: set[str] = set()
        self._durations: deque[float] = deque(maxlen=NUM_KEPT_STARTS)

    @property
    def learned_s(self) -> float | None:
        """The learned duration in seconds, or None if no start was seen from its beginning."""
        durations = sorted(self._durations)
        return durations[min(len(durations) - 1, int(CAREFUL * len(durations)))] if durations else None

    def observe(self, replicas: Iterable[ReplicaObservation], now: float) -> None:
        live = {replica.name: replica for replica in replicas if replica.live}
        for name in self._since.keys() - live.keys():
            del self._since[name]
        self._known &= live.keys()
        for name, replica in live.items():
            if name in self._known:
                continue
            if not replica.loaded:
                self._since.setdefault(name, now)
                continue
            self._known.add(name)
            started_at = self._since.pop(name, None)
            if started_at is not None:
                self._durations.append(max(0.0, now - started_at))

    def oldest_s(self, now: float) -> float:
        """Return for how many seconds the oldest starting replica has been starting."""
        return max((now - since for since in self._since.values()), default=0.0)
