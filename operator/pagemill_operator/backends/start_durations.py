"""Learns how long replicas take from the order to readiness, from observed starts. Pure functions of what is observed.

Until one was observed from its beginning, the longest start that an engine reports of itself counts, which lacks the
time until its container runs: a new leader of the operator, and a deployment that was adopted, find engines that serve.
`scaler` passes the duration to scaling policies as the cold start; `controller.reporting.cold_starts` measures each
start's phases.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from pagemill_operator.status.observation import ReplicaObservation
from pagemill_protocol.report.load import EngineStart
from pagemill_protocol.report.state import WAKE

NUM_KEPT_STARTS = 8
CAREFUL = 0.75
"""Quantile of the remembered starts that `learned_s` returns."""


class StartDurations:
    """The starts of one deployment's replicas."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._known: set[str] = set()
        self._durations: deque[float] = deque(maxlen=NUM_KEPT_STARTS)
        self._reported_s: float | None = None

    @property
    def learned_s(self) -> float | None:
        """The learned duration in seconds, or None if no start was seen and no engine reports one."""
        durations = sorted(self._durations)
        return durations[min(len(durations) - 1, int(CAREFUL * len(durations)))] if durations else self._reported_s

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

    def reported(self, starts: Iterable[EngineStart]) -> None:
        """Keep the longest start that engines report of themselves."""
        found = [sum(took_s for phase, took_s in each.seconds.items() if phase != WAKE) for each in starts]
        self._reported_s = max((each for each in found if 0 < each < math.inf), default=self._reported_s)

    def oldest_s(self, now: float) -> float:
        """Return for how many seconds the oldest starting replica has been starting."""
        return max((now - since for since in self._since.values()), default=0.0)
