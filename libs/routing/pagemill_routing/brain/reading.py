"""What status, metrics and the load stream read of the brain. Nothing here changes it."""

from __future__ import annotations

from collections.abc import Callable

from pagemill_protocol.report.load import DeploymentLoad
from pagemill_routing.brain.endpoints.record import EndpointRecord
from pagemill_routing.brain.endpoints.registry import Registry
from pagemill_routing.brain.load.measure import measure_load
from pagemill_routing.brain.load.traffic import TrafficMeter
from pagemill_routing.brain.placement.placement import Placement
from pagemill_routing.brain.queue.queues import Queues
from pagemill_routing.brain.resilience.poison_requests import PoisonDetection
from pagemill_routing.brain.resilience.recovery import Recovery


class Reader:
    def __init__(
        self,
        registry: Registry,
        placement: Placement,
        queues: Queues,
        recovery: Recovery,
        poison_detection: PoisonDetection,
        traffic: TrafficMeter,
        clock: Callable[[], float],
        routing_policies: list[str],
    ) -> None:
        self.registry = registry
        self.placement = placement
        self.queues = queues
        self.recovery = recovery
        self.poison_detection = poison_detection
        self._traffic = traffic
        self._clock = clock
        self._routing_policies = routing_policies

    def state_age_s(self, record: EndpointRecord) -> float | None:
        """Return the age of the latest report in seconds; None if there was none."""
        return record.reports.age_s(self._clock())

    def load_elsewhere(self, record: EndpointRecord) -> int:
        """Return the number of requests from elsewhere at the endpoint; 0 if its report is stale."""
        return record.load_elsewhere(self._clock())

    def load(self) -> list[DeploymentLoad]:
        """Return the load of each deployment for the load stream."""
        return measure_load(self.registry, self.queues, self._traffic, self._routing_policies, self._clock())

    def phase(self, record: EndpointRecord) -> str:
        """Return `EndpointRecord.phase_at`; `ejected` for an ejected endpoint that is `stale` or `ready`."""
        now = self._clock()
        phase = record.phase_at(now)
        is_ejected = phase in ("stale", "ready") and not self.recovery.ejection(record).allows(now)
        return "ejected" if is_ejected else phase
