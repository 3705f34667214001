"""Decides how long requests wait for an engine while their deployment has none, and starts timing its start."""

from __future__ import annotations

import math
from collections.abc import Callable

from pagemill_protocol.resource.served import QueueLimits
from pagemill_routing.brain.endpoints.deployment import WAIT_FACTOR, DeploymentRecord
from pagemill_routing.brain.endpoints.registry import Registry


class Outage:
    """The wait of one request during an outage of its deployment."""

    def __init__(self) -> None:
        self._until: float | None = None

    def is_over(self, now: float, wait_left_s: float) -> bool:
        """Whether the request has waited as long as `wait_left_s` was at the first call."""
        if self._until is None:
            self._until = now + wait_left_s
        return now >= self._until

    def ended(self) -> None:
        """Note that there is an engine again; the next outage is a new one."""
        self._until = None


class Outages:
    """The outages of all deployments. `wait_s` is the minimum wait for an engine that was just lost."""

    def __init__(self, registry: Registry, limits: QueueLimits, wait_s: float, clock: Callable[[], float]) -> None:
        """`limits` are those of deployments that have none of their own."""
        self._registry = registry
        self._limits = limits
        self._wait_s = wait_s
        self._clock = clock

    def limits(self, key: str) -> QueueLimits:
        """Return the limits of the deployment's queue."""
        deployment = self._registry.deployments.get(key)
        return (deployment.model.queue if deployment is not None else None) or self._limits

    def is_serving(self, key: str) -> bool:
        deployment = self._registry.deployments.get(key)
        return deployment is not None and deployment.serving

    def start_left_s(self, key: str) -> float | None:
        """Return the expected time until the deployment has an engine again; `None` if unknown or if it has one."""
        deployment = self._registry.deployments.get(key)
        return deployment.starts.left_s(self._clock()) if deployment is not None and not deployment.serving else None

    def waits_until(self, key: str, arrived_at: float) -> float:
        """Return the instant until which a start of the deployment lets a request wait; -inf without one."""
        deployment = self._registry.deployments.get(key)
        return deployment.starts.waits_until(arrived_at) if deployment is not None else -math.inf

    def wanted(self, model: str) -> list[DeploymentRecord]:
        return [each for each in self._registry.named(model) if each.model.share > 0]

    def waits_left_s(self, model: str) -> dict[str, float]:
        """Return the remaining time that requests may wait for an engine, for each deployment with the name."""
        return {each.key: self.wait_left_s(each) for each in self.wanted(model)}

    def wait_left_s(self, deployment: DeploymentRecord) -> float:
        """Return the remaining time that requests may wait for an engine that was just lost or will report soon."""
        if deployment.model.wakes:
            now = self._clock()
            return max(self.limits(deployment.key).timeout_s, deployment.starts.waits_until(now) - now)
        wait_s = self._wait_s
        if wait_s > 0 and (usual_s := deployment.starts.usual_s(from_zero=False)) is not None:
            wait_s = max(wait_s, min(WAIT_FACTOR * usual_s, self.limits(deployment.key).timeout_s))
        if any(record.expected for record in deployment.records):
            return wait_s
        if deployment.last_served_at is None:
            return 0.0
        return max(0.0, deployment.last_served_at + wait_s - self._clock())

    def note_demand(self, deployments: list[DeploymentRecord]) -> None:
        """Begin to time the starts of deployments without an engine, because a request waits for one.

        An engine that is expected to report soon is not starting, so its deployment's start is not timed; neither is a
        wait for an adapter on engines that serve.
        """
        for each in deployments:
            if not each.usable() and not any(record.expected for record in each.records):
                each.starts.requested(self._clock(), from_zero=not each.records)
