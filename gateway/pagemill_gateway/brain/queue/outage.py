"""How long requests wait for an engine while their deployment has none, and when its start is timed."""

from __future__ import annotations

from collections.abc import Callable

from pagemill_gateway.brain.endpoints.deployment import WAIT_FACTOR, DeploymentRecord
from pagemill_gateway.brain.endpoints.registry import Registry
from pagemill_protocol.catalog import QueueLimits


class Outage:
    """The outage of a deployment as one request sees it."""

    def __init__(self) -> None:
        self._until: float | None = None

    def is_over(self, now: float, wait_left_s: float) -> bool:
        """Whether the request has waited enough: `wait_left_s`, as it was when the outage was first seen."""
        if self._until is None:
            self._until = now + wait_left_s
        return now >= self._until

    def ended(self) -> None:
        """There is an engine again; the next outage is a new one."""
        self._until = None


class Outages:
    """The outages of all deployments. `wait_s`: the least wait for an engine that was lost a moment ago."""

    def __init__(
        self, registry: Registry, limits: Callable[[str], QueueLimits], wait_s: float, clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._limits = limits
        self._wait_s = wait_s
        self._clock = clock

    def wanted(self, model: str) -> list[DeploymentRecord]:
        return [each for each in self._registry.named(model) if each.model.weight > 0]

    def waits_left_s(self, model: str) -> dict[str, float]:
        """How much longer requests may wait for an engine of each deployment with that name."""
        return {each.key: self.wait_left_s(each) for each in self.wanted(model)}

    def wait_left_s(self, deployment: DeploymentRecord) -> float:
        """How much longer requests may wait for an engine: one that was lost a moment ago, or that its platform calls
        ready.
        """
        if deployment.model.wakes:
            now = self._clock()
            return max(self._limits(deployment.key).timeout_s, deployment.starts.waits_until(now) - now)
        wait_s = self._wait_s
        if wait_s > 0 and (usual_s := deployment.starts.usual_s(from_zero=False)) is not None:
            wait_s = max(wait_s, min(WAIT_FACTOR * usual_s, self._limits(deployment.key).timeout_s))
        if any(record.expected for record in deployment.records):
            return wait_s
        if deployment.last_served_at is None:
            return 0.0
        return max(0.0, deployment.last_served_at + wait_s - self._clock())

    def note_demand(self, deployments: list[DeploymentRecord]) -> None:
        """A request waits for an engine of deployments that have none: their starts are timed from now on.

        An engine that is up and has not reported yet does not start: the time to its report says nothing of a start.
        """
        for each in deployments:
            if not any(record.expected for record in each.records):
                each.starts.requested(self._clock(), from_zero=not each.records)
