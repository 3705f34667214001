"""Engines that ended with one request, as far as they may say something of it. Pure; one per request.

What they say is the brain's to know, which hears of them with the next try (`brain.resilience.poison_requests`): it is
kept here, so that it outlives a brain. Here is only how long a request waits before it is tried where nobody else may
be.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from pagemill_gateway.brain.interface import Assignment, EngineFailure, FailureKind

PROBE_PAUSE_BASE_S = 0.5
PROBE_PAUSE_MAX_S = 8.0
"""Before a trial that follows another one; doubles each time. What ends engines by chance is over then, or known."""


class EngineFailures:
    def __init__(self, uniform: Callable[[float, float], float] = random.uniform) -> None:
        """`uniform`: chance, which simulations replay."""
        self._uniform = uniform
        self._failures: list[EngineFailure] = []
        self._num_probes = 0
        """In a row whose engines ended."""
        self._owes_pause = False

    @property
    def recorded(self) -> tuple[EngineFailure, ...]:
        return tuple(self._failures)

    def failed(self, assignment: Assignment, kind: FailureKind, *, progressed: bool) -> None:
        """One try ended; `progressed`: it brought tokens, which no engine gets from a request that brings it down."""
        if progressed:
            self._num_probes = 0
        match kind:
            case "crashed" | "lost" | "killed":
                self._failures.append(EngineFailure(assignment.decision, kind, assignment.probe, progressed))
                self._num_probes += assignment.probe != "none" and not progressed
                self._owes_pause = self._num_probes > 0

    def take_pause_s(self) -> float:
        """How long to wait before the next try; once for each trial whose engine ended."""
        if not self._owes_pause:
            return 0.0
        self._owes_pause = False
        return min(PROBE_PAUSE_MAX_S, PROBE_PAUSE_BASE_S * 2.0 ** (self._num_probes - 1)) * self._uniform(0.5, 1.0)
