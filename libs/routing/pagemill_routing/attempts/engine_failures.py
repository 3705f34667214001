"""Records the engines that ended or fell silent with one request, and computes the pause before its next probe. Pure.

The brain gets the records with the next attempt and evaluates them (`brain.resilience.poison_requests`). They are kept
here, so that they outlive a control process.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from pagemill_routing.brain.interface import Assignment, EngineFailure, FailureKind

PROBE_PAUSE_BASE_S = 0.5
PROBE_PAUSE_MAX_S = 8.0
"""First and longest pause before a probe that follows another one; it doubles each time, so that other causes are over
or have shown themselves.
"""


class EngineFailures:
    def __init__(self, uniform: Callable[[float, float], float] = random.uniform) -> None:
        """`uniform` draws random numbers; simulations pass their own."""
        self._uniform = uniform
        self._failures: list[EngineFailure] = []
        self._num_probes = 0
        """The number of probes in a row whose engines ended."""
        self._owes_pause = False

    @property
    def recorded(self) -> tuple[EngineFailure, ...]:
        return tuple(self._failures)

    def failed(self, assignment: Assignment, kind: FailureKind, *, progressed: bool) -> None:
        """Note a failed attempt. `progressed`: it brought tokens, which a poison request does not."""
        if progressed:
            self._num_probes = 0
        match kind:
            case "crashed" | "lost" | "killed" | "stalled":
                self._failures.append(EngineFailure(assignment.decision, kind, assignment.probe, progressed))
                self._num_probes += assignment.probe != "none" and not progressed
                self._owes_pause = self._num_probes > 0

    def take_pause_s(self) -> float:
        """Return the seconds to wait before the next attempt, once for each probe whose engine ended."""
        if not self._owes_pause:
            return 0.0
        self._owes_pause = False
        return min(PROBE_PAUSE_MAX_S, PROBE_PAUSE_BASE_S * 2.0 ** (self._num_probes - 1)) * self._uniform(0.5, 1.0)
