"""The latest report of every gateway, and the load of a deployment that they report together.

All gateways follow the same engines, so their reports on one deployment describe the same thing: the freshest one
counts, since sums would count twice. Only their queues are their own and add up. `status.load` decides how much of it
`status` shows, and how often; `autoscaler` decides how many replicas it needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from pagemill_operator.autoscaler.signals import GatewayReport, merged_queue, most_in_flight, reported_engines, weight
from pagemill_protocol.report.load import DeploymentLoad, EngineReport, EngineStart, LoadFrame
from pagemill_protocol.report.state import EngineLoad

Item = TypeVar("Item")


class _Report(NamedTuple):
    """One gateway's report on one deployment."""

    load: DeploymentLoad
    at_s: float
    """When the frame arrived, on the operator's clock."""

    @property
    def shown(self) -> tuple[object, ...]:
        """The part that the status shows."""
        engines, queue, pods = self.load.engines, self.load.queue, self.load.pods
        usage = round(100 * engines.kv_cache_usage)
        counts = (usage, engines.num_requests_running, engines.num_requests_waiting, pods.ready, queue.num_requests)
        adapters = [(each.id, *each.adapters) for each in self.load.replicas if each.adapters]
        slow = [(each.id, each.slow_rank) for each in self.load.replicas if each.slow_rank is not None]
        starts = [start.id for start in self.load.starts]
        return *counts, pods.asleep, *self.load.unused_settings, *self.load.routing_policies, *adapters, *slow, *starts


class LoadStore:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reports: dict[str, dict[str, _Report]] = {}
        """Gateway -> deployment's key -> its latest report."""

    def put(self, gateway: str, frame: LoadFrame) -> set[str]:
        """Store a frame; return the keys of which the status may show something else than after the last one."""
        now, before = self._clock(), self._reports.get(gateway, {})
        self._reports[gateway] = after = {load.key: _Report(load, now) for load in frame.deployments}
        return {key for key, report in after.items() if key not in before or before[key].shown != report.shown}

    def remove(self, gateway: str) -> None:
        """Remove the reports of a gateway whose stream has ended: they may be outdated."""
        self._reports.pop(gateway, None)

    def latest(self, gateway: str) -> list[DeploymentLoad]:
        """Return the latest report of a gateway on all deployments; empty if there is none."""
        return [report.load for report in self._reports.get(gateway, {}).values()]

    def reports(self, key: str) -> list[GatewayReport]:
        """Return the latest report of each gateway that knows the deployment."""
        now = self._clock()
        return [GatewayReport(report.load, now - report.at_s) for report in self._of(key)]

    def held(self, key: str) -> dict[str, EngineReport]:
        """Return each engine's load, the highest that any gateway reports."""
        return most_in_flight(report.load for report in self._of(key))

    def starts(self, key: str) -> dict[str, EngineStart]:
        """Return each engine's start and its latest wake."""
        return {start.id: start for report in self._of(key) for start in report.load.starts}

    def asleep(self, key: str) -> frozenset[str]:
        """Return the engines that any gateway reports as sleeping, so that none counts as awake too early."""
        return frozenset(engine for report in self._of(key) for engine in report.load.asleep)

    def unused_settings(self, key: str) -> frozenset[str] | None:
        """Return the engines' settings that have no effect with the kind of their model; None if none is loaded."""
        reports = [report.load for report in self._of(key)]
        if not any(load.pods.ready + load.pods.asleep for load in reports):
            return None
        return frozenset(name for load in reports for name in load.unused_settings)

    def routing_policies(self, key: str) -> tuple[str, ...]:
        """Return the policies of the gateways that lack the deployment's own; empty: none lacks it."""
        return tuple(dict.fromkeys(name for report in self._of(key) for name in report.load.routing_policies))

    def needs_engine(self, key: str) -> bool:
        """Whether a request waits and there is no engine."""
        return any(report.load.queue.needs_engine for report in self._of(key))

    def measured(self, key: str) -> EngineLoad | None:
        """Return the load of all engines, with the gateways' queues among the waiting requests, as `status` shows it.

        None if no gateway knows the deployment.
        """
        reports = self.reports(key)
        if not reports:
            return None
        engines = reported_engines(reports)
        queue = merged_queue(report.load.queue for report in reports)
        return EngineLoad(
            num_kv_bytes_total=engines.num_kv_bytes_total,
            num_kv_bytes_active=engines.num_kv_bytes_active,
            num_requests_running=engines.num_requests_running,
            num_requests_waiting=engines.num_requests_waiting + queue.num_requests,
        )

    def _of(self, key: str) -> list[_Report]:
        return [loads[key] for loads in self._reports.values() if key in loads]


def emptiest_first(items: Iterable[Item], id_of: Callable[[Item], str], held: Mapping[str, EngineReport]) -> list[Item]:
    """Return the items ordered by what their engines hold for running requests, least first.

    Items without a report come last, because their load is unknown. Equal items keep their order.
    """

    def order(item: Item) -> tuple[bool, tuple[int, int]]:
        engine = held.get(id_of(item))
        return engine is None, weight(engine) if engine is not None else (0, 0)

    return sorted(items, key=order)
