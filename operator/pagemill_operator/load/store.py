"""The latest report of every gateway, and what they report together of one deployment.

All gateways follow the same engines, so their reports of one deployment are views of the same thing: the freshest
counts, sums would count twice. Only their queues are their own and add up. How much of it `status` shows, and how
often, is decided in `status.load`; how many replicas it asks for, in `autoscaler`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from pagemill_operator.autoscaler.signals import View, most_held, weight
from pagemill_protocol.load import DeploymentLoad, EngineHeld, EngineStart, LoadFrame

Item = TypeVar("Item")


class MeasuredLoad(NamedTuple):
    """What `status.load` is made from."""

    kv_cache_usage: float | None
    """Share of all blocks held by running requests; None where no engine is known."""
    running: int
    waiting: int
    """In engines, and in the gateways' queues."""


class _Report(NamedTuple):
    """What one gateway has reported of one deployment."""

    load: DeploymentLoad
    at_s: float
    """When the frame came, on our clock."""

    @property
    def counts(self) -> tuple[int, ...]:
        engines, queue, pods = self.load.engines, self.load.queue, self.load.pods
        usage = round(100 * engines.num_blocks_active / max(1, engines.num_blocks_total))
        return usage, engines.num_requests_running, engines.num_requests_waiting, pods.ready, queue.num_requests


class LoadStore:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reports: dict[str, dict[str, _Report]] = {}
        """Gateway -> deployment's key -> its latest report."""

    def put(self, gateway: str, frame: LoadFrame) -> set[str]:
        """Keys of which the gateway reports something else than before."""
        now, before = self._clock(), self._reports.get(gateway, {})
        self._reports[gateway] = after = {load.key: _Report(load, now) for load in frame.deployments}
        return {key for key, report in after.items() if key not in before or before[key].counts != report.counts}

    def remove(self, gateway: str) -> None:
        """Its stream has ended: what it reported may not be true any more."""
        self._reports.pop(gateway, None)

    def views(self, key: str) -> list[View]:
        """The latest report of each gateway that knows the deployment."""
        now = self._clock()
        return [View(report.load, now - report.at_s) for report in self._of(key)]

    def held(self, key: str) -> dict[str, EngineHeld]:
        """By engine, the most that any gateway reports of it."""
        return most_held(report.load for report in self._of(key))

    def starts(self, key: str) -> dict[str, EngineStart]:
        """By engine, how its start went, and its latest wake."""
        return {start.id: start for report in self._of(key) for start in report.load.starts}

    def asleep(self, key: str) -> frozenset[str]:
        """Engines that sleep as any gateway reports: none is taken for awake too early."""
        return frozenset(engine for report in self._of(key) for engine in report.load.asleep)

    def needs_engine(self, key: str) -> bool:
        """A request waits where no engine is."""
        return any(report.load.queue.needs_engine for report in self._of(key))

    def measured(self, key: str) -> MeasuredLoad | None:
        """None while no gateway knows the deployment."""
        reports = self._of(key)
        if not reports:
            return None
        best = max(reports, key=lambda each: (each.load.engines.num_reporting > 0, each.at_s - _age(each.load)))
        engines = best.load.engines
        usage = engines.num_blocks_active / engines.num_blocks_total if engines.num_blocks_total > 0 else None
        queued = sum(max(0, each.load.queue.num_requests) for each in reports)
        return MeasuredLoad(
            kv_cache_usage=None if usage is None else min(1.0, max(0.0, usage)),
            running=max(0, engines.num_requests_running),
            waiting=max(0, engines.num_requests_waiting) + queued,
        )

    def _of(self, key: str) -> list[_Report]:
        return [loads[key] for loads in self._reports.values() if key in loads]


def emptiest_first(items: Iterable[Item], id_of: Callable[[Item], str], held: Mapping[str, EngineHeld]) -> list[Item]:
    """In the order of what would be lost by removing them: what their engines hold for running requests.

    Engines that are in no report come last: what they hold is not known. Equals keep their order.
    """

    def order(item: Item) -> tuple[bool, tuple[int, int]]:
        engine = held.get(id_of(item))
        return engine is None, weight(engine) if engine is not None else (0, 0)

    return sorted(items, key=order)


def _age(load: DeploymentLoad) -> float:
    return load.engines.age_s if math.isfinite(load.engines.age_s) else 0.0
