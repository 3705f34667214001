"""Pagemill's own autoscaler: the operator's `decide`, with the signals of its load stream."""

from __future__ import annotations

from collections import deque

import msgspec

from pagemill_operator.autoscaler.decide import decide
from pagemill_operator.autoscaler.decision import Decision
from pagemill_operator.autoscaler.memory import Memory
from pagemill_operator.autoscaler.policy import Policy
from pagemill_simulator.scaling.policy import Seen

INTERVAL_S = 2.0
"""The operator's, on a cluster."""
REMEMBERED = 10_000


class PagemillPolicy:
    """Of one run: it remembers."""

    def __init__(self, policy: Policy) -> None:
        # Advice that nobody follows would be judged by what it did not do.
        self._policy = msgspec.structs.replace(policy, mode="Active")
        self._memory = Memory()
        self.changes: deque[tuple[float, Decision]] = deque(maxlen=REMEMBERED)
        """When it has changed the replicas, and why; the latest."""

    @property
    def name(self) -> str:
        return "pagemill"

    @property
    def interval_s(self) -> float:
        return INTERVAL_S

    @property
    def wakes_at_once(self) -> bool:
        return True

    def decide(self, seen: Seen) -> int:
        decision, self._memory = decide(self._policy, seen.signals, self._memory)
        if decision.changes:
            self.changes.append((seen.at_s, decision))
        return decision.replicas
