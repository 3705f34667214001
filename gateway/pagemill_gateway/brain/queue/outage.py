"""How long requests wait for an engine while their deployment has none, and what is learned of starts meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from pagemill_gateway.brain.endpoints.deployment import DeploymentRecord
from pagemill_gateway.brain.endpoints.registry import Registry
from pagemill_protocol.catalog import QueueLimits

WAIT_FACTOR = 2.0
"""An engine that comes back may take so many times as long as it usually does."""


class Outage:
    """As one request sees it."""

    def __init__(self) -> None:
        self._until: float | None = None

    def is_over(self, now: float, left_s: float) -> bool:
        """Whether it has waited enough; `left_s`, as it was when the outage was first seen, is how long that is."""
        if self._until is None:
            self._until = now + left_s
        return now >= self._until

    def ended(self) -> None:
        """There is an engine again; the next outage is another one."""
        self._until = None


class Outages:
    """Of all deployments. `wait_s`: the least that an engine which was lost a moment ago is waited for."""

    def __init__(
        self, registry: Registry, limits: Callable[[str], QueueLimits], wait_s: float, clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._limits = limits
        self._wait_s = wait_s
        self._clock = clock

    def wanted(self, model: str) -> list[DeploymentRecord]:
        return [each for each in self._registry.named(model) if each.model.weight > 0]

    def lefts_s(self, model: str) -> dict[str, float]:
        """How much longer an engine of each deployment of that name may be waited for."""
        return {each.key: self.left_s(each) for each in self.wanted(model)}

    def left_s(self, deployment: DeploymentRecord) -> float:
        """How much longer requests may wait for an engine: one that was lost a moment ago, or is known to be ready."""
        if deployment.model.wakes:
            return self._limits(deployment.key).timeout_s
        wait_s = self._wait_s
        if wait_s > 0 and (usual_s := deployment.starts.usual_s(from_zero=False)) is not None:
            wait_s = max(wait_s, min(WAIT_FACTOR * usual_s, self._limits(deployment.key).timeout_s))
        if any(record.expected for record in deployment.records):
            return wait_s
        if deployment.last_served_at is None:
            return 0.0
        return max(0.0, deployment.last_served_at + wait_s - self._clock())

    def note_demand(self, deployments: list[DeploymentRecord]) -> None:
        """None of them has an engine, and somebody waits for one.

        One that is up and was not heard yet does not start: how soon it is heard says nothing of a start.
        """
        for each in deployments:
            if not any(record.expected for record in each.records):
                each.starts.requested(self._clock(), from_zero=not each.records)
