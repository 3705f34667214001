"""Engines that ended with one request. Pure; one per request.

The brain judges them (`brain.resilience.poison_requests`), which gets them with the next try; they are kept here, so
that they outlive a control process. This module decides only how long a request waits before a probe.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from pagemill_gateway.brain.interface import Assignment, EngineFailure, FailureKind

PROBE_PAUSE_BASE_S = 0.5
PROBE_PAUSE_MAX_S = 8.0
"""Before a probe that follows another one; doubles each time. A cause that ends engines by chance is over then, or
known.
"""


class EngineFailures:
    def __init__(self, uniform: Callable[[float, float], float] = random.uniform) -> None:
        """`uniform` draws random numbers, which simulations replay."""
        self._uniform = uniform
        self._failures: list[EngineFailure] = []
        self._num_probes = 0
        """Probes in a row whose engines ended."""
        self._owes_pause = False

    @property
    def recorded(self) -> tuple[EngineFailure, ...]:
        return tuple(self._failures)

    def failed(self, assignment: Assignment, kind: FailureKind, *, progressed: bool) -> None:
        """One try ended; `progressed`: it brought tokens, which no engine gets from a poison request."""
        if progressed:
            self._num_probes = 0
        match kind:
            case "crashed" | "lost" | "killed":
                self._failures.append(EngineFailure(assignment.decision, kind, assignment.probe, progressed))
                self._num_probes += assignment.probe != "none" and not progressed
                self._owes_pause = self._num_probes > 0

    def take_pause_s(self) -> float:
        """How long to wait before the next try; once for each probe whose engine ended."""
        if not self._owes_pause:
            return 0.0
        self._owes_pause = False
        return min(PROBE_PAUSE_MAX_S, PROBE_PAUSE_BASE_S * 2.0 ** (self._num_probes - 1)) * self._uniform(0.5, 1.0)
