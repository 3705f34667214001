"""The side of the brain that discovery calls: it applies the catalogue, reports, and the ends of their streams.

`EndpointRecord.accept` applies a report to its endpoint; this module applies what follows for the deployment, the
prefix index and the requests that wait. `brain.brain` decides with the result, and `brain.reading` shows it.
"""

from __future__ import annotations

from collections.abc import Callable

from pagemill_protocol.catalog import Catalog
from pagemill_protocol.report.state import StateFrame
from pagemill_routing.brain.endpoints.registry import ChangeNotifier, Registry
from pagemill_routing.brain.load.traffic import TrafficMeter
from pagemill_routing.brain.placement.placement import Placement
from pagemill_routing.brain.queue.queues import Queues
from pagemill_routing.brain.resilience.poison_requests import PoisonDetection
from pagemill_routing.brain.resilience.recovery import Recovery


class Observer:
    def __init__(
        self,
        registry: Registry,
        placement: Placement,
        queues: Queues,
        recovery: Recovery,
        poison_detection: PoisonDetection,
        traffic: TrafficMeter,
        clock: Callable[[], float],
        *,
        keeps_terminating: bool,
    ) -> None:
        """`keeps_terminating`: whether a terminating endpoint is needed until another one is usable."""
        self.registry = registry
        self.changes = ChangeNotifier()
        self._placement = placement
        self._queues = queues
        self._recovery = recovery
        self._poison_detection = poison_detection
        self._traffic = traffic
        self._clock = clock
        self._keeps_terminating = keeps_terminating

    def apply_catalog(self, catalog: Catalog) -> None:
        known, before = self.registry.endpoints, set(self.registry.deployments)
        self.registry.apply(catalog, self._clock())
        deployments = set(self.registry.deployments)
        self._recovery.keep_only(deployments, self.registry.endpoints)
        for endpoint_id, record in known.items():
            if self.registry.endpoints.get(endpoint_id) is not record:
                self._placement.forget(endpoint_id)
        self._traffic.keep(deployments)
        self._poison_detection.keep(deployments)
        self._placement.keep(deployments)
        self._announce()
        self._queues.forget(before - deployments)

    def observe(self, endpoint_id: str, frame: StateFrame) -> None:
        """Apply a state frame of an endpoint. Raises `StateGap`, after which the caller must reconnect."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is None:
            return
        now = self._clock()
        was_connected, was_usable = record.reports.connected, record.usable
        num_identities, adapters = record.reports.num_identities, record.adapters.by_name
        # Before `accept`, because the record changes also if the frame leaves a gap.
        self._placement.changed(record)
        record.accept(frame, now, self._placement.num_decisions)
        self._placement.observe(record, frame)
        if not was_connected:
            self._recovery.ejection(record).probe_now()
        adapters_changed = record.adapters.by_name is not adapters
        self.registry.reported(record, frame, now, adapters_changed=adapters_changed)
        is_usable = record.usable
        if is_usable != was_usable or adapters_changed or record.reports.num_identities != num_identities:
            self.registry.changed(record)
        if is_usable != was_usable or adapters_changed:
            self._announce()
        else:
            self._queues.pump(record.deployment)

    def stream_lost(self, endpoint_id: str) -> None:
        """Note that the state stream of an endpoint ended."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is None:
            return
        if record.reports.connected and not (record.leaving or record.draining):
            self._poison_detection.stream_lost(record, self._clock())
        record.reports.disconnected()
        self._placement.changed(record)

    def unreachable(self, endpoint_id: str) -> None:
        """Send no requests to the endpoint until it reports again, because no process listens at its address."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is not None:
            record.unreachable = True
            self.registry.changed(record)

    def drain(self, endpoint_id: str) -> None:
        """Send no more requests to the endpoint, unless it restarts or wakes up."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is not None:
            record.draining = True
            self.registry.changed(record)

    def drain_acknowledged(self, endpoint_id: str) -> None:
        """Note that the endpoint has received the confirmation that it gets no more requests."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is not None:
            record.drain_acknowledged = True

    def replaceable(self, endpoint_id: str) -> bool:
        """Whether the endpoint is not needed: another one of its deployment is usable, or the deployment is gone."""
        record = self.registry.endpoints.get(endpoint_id)
        deployment = self.registry.deployments.get(record.deployment) if record is not None else None
        if record is None or deployment is None or record.draining:
            return True
        if record.endpoint.terminating and not self._keeps_terminating:
            return True
        return any(other.usable for other in deployment.records)

    def awaiting_first_report(self, endpoint_id: str) -> None:
        """Note that discovery opens an endpoint's first state stream."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is not None:
            record.awaiting_first_report = True

    def note_phase(self, endpoint_id: str, phase: str, detail: str) -> None:
        """Note the `/readyz` phase of an endpoint that is not ready, for status and error messages."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is None:
            return
        record.phase, record.detail = phase, detail
        if record.awaiting_first_report:
            record.awaiting_first_report = False
            self._queues.pump(record.deployment)

    def ready(self, endpoint_id: str) -> bool:
        """Whether the endpoint has reported what it serves."""
        record = self.registry.endpoints.get(endpoint_id)
        return record is not None and record.max_model_len > 0

    def leaving(self, endpoint_id: str) -> bool:
        """Whether the endpoint is terminating or draining, or gone from the catalogue."""
        record = self.registry.endpoints.get(endpoint_id)
        return record is None or record.leaving

    def _announce(self) -> None:
        """Try all waiting requests, because the set of usable endpoints has changed."""
        self.changes.publish()
        self._queues.pump_all()
