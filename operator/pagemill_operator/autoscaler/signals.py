"""The inputs of a decision: the replicas, and the load that all gateways together report.

All gateways receive the reports of the same engines, so the best of those views counts; the gateways' own queues,
arrivals and latencies add up. Missing numbers are not replaced: without a gateway's report the sums are lower bounds,
and `Signals.missing` says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from pagemill_protocol.report.histogram import merged
from pagemill_protocol.report.load import (
    Arrivals,
    DeploymentLoad,
    EngineReport,
    EnginesLoad,
    Latencies,
    Lengths,
    QueueLoad,
)
from pagemill_protocol.report.state import COUNTS, EngineLoad, StepTimeParams

STARTS_S = 600.0
COLD_STARTS = 2.0
"""Starting replicas are waited for this long, or this many times a usual start, whichever is longer."""


class Fleet(msgspec.Struct, frozen=True):
    """The replicas of a deployment by state."""

    wanted: int
    """Replicas of the latest order."""
    ready: int = 0
    loading: int = 0
    """Replicas that run and are not ready."""
    pending: int = 0
    """Replicas that have no node yet."""
    asleep: int = 0
    """Replicas that are loaded and asleep: they serve nothing, and wake sooner than another could start."""
    starting_s: float = 0.0
    """The time since the oldest starting replica was ordered."""
    cold_start_s: float | None = None
    """The usual time from the order to ready; None: no start was seen yet."""

    @property
    def starting(self) -> int:
        """Replicas that are ordered and not ready."""
        return self.loading + self.pending

    @property
    def longest_start_s(self) -> float:
        """The time for which starting replicas are waited for; then the load alone decides."""
        return max(STARTS_S, COLD_STARTS * (self.cold_start_s or 0.0))

    @property
    def is_awaited(self) -> bool:
        """Whether replicas start, for no longer than that is waited for."""
        return self.starting > 0 and self.starting_s < self.longest_start_s


class Signals(msgspec.Struct, frozen=True):
    """Everything that is known at one time."""

    at_s: float
    """The time by a monotonic clock."""
    fleet: Fleet
    num_gateways: int = 1
    num_reporting: int = 0
    """Gateways whose reports are in these numbers."""
    engines: EnginesLoad = EnginesLoad()
    queue: QueueLoad = QueueLoad()
    arrivals: Arrivals = Arrivals()
    latencies: Latencies = Latencies()
    lengths: Lengths = Lengths()
    active_s: float | None = None
    """The time since there were requests or a first replica started (`Activity`); None: neither was seen."""
    replicas: tuple[EngineReport, ...] = msgspec.field(default=(), name="engine_reports")
    """The load of each engine, for policies whose `sees_replicas` is True."""

    @property
    def is_complete(self) -> bool:
        """Whether every gateway reports; otherwise sums over gateways are lower bounds."""
        return 0 < self.num_gateways <= self.num_reporting

    @property
    def missing(self) -> str:
        """The names of unknown inputs that may hide load; empty if all are known."""
        if not self.is_complete:
            return f"{self.num_reporting} of {self.num_gateways} gateways report"
        if self.engines.truth != "value":
            return f"the engines' reports are {self.engines.truth}"
        if self.arrivals.truth != "value":
            return f"the arrivals are {self.arrivals.truth}"
        return ""

    @property
    def num_requests(self) -> int:
        """Requests that run or wait anywhere."""
        return self.engines.num_requests + self.queue.num_requests

    @property
    def quiet_s(self) -> float:
        """The time since the latest request arrived or ended, or the first replica became ready."""
        return self.arrivals.idle_s if self.active_s is None else min(self.arrivals.idle_s, self.active_s)

    @property
    def has_no_traffic(self) -> bool:
        """Whether no request runs or waits and none has arrived within the window of the arrivals."""
        return self.num_requests == 0 and self.arrivals.requests_per_s <= 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait in gateways and engines."""
        return self.engines.num_requests_waiting + self.queue.num_requests


class Activity:
    """When a deployment was last active, so that a replica that was started serves for an idle window at least, even
    if the request for which it was started did not wait for it.
    """

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._was_ready = True

    def seen(self, signals: Signals) -> Signals:
        """Return the signals with the time since the latest activity."""
        fleet, was_ready = signals.fleet, self._was_ready
        self._was_ready = fleet.ready > 0
        if signals.num_requests or (fleet.ready and not was_ready) or (fleet.is_awaited and not fleet.ready):
            self._at_s = signals.at_s
        active_s = None if self._at_s is None else signals.at_s - self._at_s
        return msgspec.structs.replace(signals, active_s=active_s)


class GatewayReport(msgspec.Struct, frozen=True):
    """The report of one gateway and its age."""

    load: DeploymentLoad
    age_s: float = 0.0


def merge(
    reports: Sequence[GatewayReport], fleet: Fleet, *, num_gateways: int, at_s: float, has_replicas: bool = False
) -> Signals:
    """Combine the reports of gateways. `num_gateways`: gateways that serve. `has_replicas`: fill `Signals.replicas`."""
    loads = [view.load for view in reports]
    return Signals(
        at_s=at_s,
        fleet=fleet,
        num_gateways=num_gateways,
        num_reporting=len(reports),
        engines=_engines(reports, fleet),
        queue=merged_queue(load.queue for load in loads),
        arrivals=_arrivals([load.arrivals for load in loads]),
        latencies=_latencies([load.latencies for load in loads]),
        lengths=_lengths([load.lengths for load in loads]),
        replicas=_replicas(loads) if has_replicas else (),
    )


def most_in_flight(loads: Iterable[DeploymentLoad]) -> dict[str, EngineReport]:
    """Return for each engine the report of the gateway that sees most on it, by the engine's id."""
    found: dict[str, EngineReport] = {}
    for engine in (engine for load in loads for engine in load.replicas):
        found[engine.id] = max(found.get(engine.id, engine), engine, key=weight)
    return found


def weight(engine: EngineReport) -> tuple[int, int]:
    """Return the sort key of an engine's work: its KV cache, which another engine would compute again, come first."""
    return engine.load.num_kv_bytes_active, engine.num_requests


def _replicas(loads: Sequence[DeploymentLoad]) -> tuple[EngineReport, ...]:
    """Return the reports with possible numbers, by id."""
    return tuple(each for _, each in sorted(most_in_flight(loads).items()) if is_valid(each.load))


def _engines(reports: Sequence[GatewayReport], fleet: Fleet) -> EnginesLoad:
    engines = reported_engines(reports)
    # Engines that the platform calls ready may be busy although they report to no gateway.
    if engines.truth == "value" and engines.num_reporting < fleet.ready:
        truth = "stale" if engines.num_reporting else "unknown"
        return msgspec.structs.replace(engines, truth=truth)
    return engines


def reported_engines(reports: Sequence[GatewayReport]) -> EnginesLoad:
    """Return the load of the engines in the report that knows most of them: by truth, number and age, in this order.

    Unknown without a report, and where that report has impossible numbers.
    """
    if not reports:
        return EnginesLoad()
    order = {"unknown": 0, "stale": 1, "value": 2}
    best = max(
        reports, key=lambda v: (order[v.load.engines.truth], v.load.engines.num_reporting, -v.age_s - _age(v.load))
    )
    reported = best.load.engines
    engines = msgspec.structs.replace(
        reported, age_s=round(best.age_s + _age(best.load), 3), step_time=_readable(reported.step_time)
    )
    return engines if is_valid(engines) and math.isfinite(engines.age_s) else EnginesLoad()


def is_valid(load: EngineLoad) -> bool:
    """Whether all counts are 0 or more, and the time is finite so that JSON can represent it in a record."""
    return all(getattr(load, name) >= 0 for name in COUNTS) and math.isfinite(load.step_ms)


def _readable(step_time: StepTimeParams) -> StepTimeParams:
    """Return the parameters, or none where a number is not finite, which JSON cannot represent in a record."""
    numbers = (
        *step_time.knot_ms,
        step_time.decode_context_ms,
        step_time.chunk_context_ms,
        step_time.error_p50,
        step_time.error_p95,
    )
    return step_time if all(map(math.isfinite, numbers)) else StepTimeParams()


def _age(load: DeploymentLoad) -> float:
    age_s = load.engines.age_s
    return age_s if math.isfinite(age_s) else 0.0


def merged_queue(queues: Iterable[QueueLoad]) -> QueueLoad:
    """Return the queues of all gateways as one."""
    queues = list(queues)
    oldest = [queue.oldest_s for queue in queues if queue.oldest_s is not None and math.isfinite(queue.oldest_s)]
    return QueueLoad(
        num_requests=sum(max(0, queue.num_requests) for queue in queues),
        num_bytes=sum(max(0, queue.num_bytes) for queue in queues),
        num_tokens=sum(max(0, queue.num_tokens) for queue in queues),
        oldest_s=max(oldest, default=None),
        needs_engine=any(queue.needs_engine for queue in queues),
    )


def _arrivals(arrivals: Sequence[Arrivals]) -> Arrivals:
    """Add up the arrivals; unknown where one gateway reports none, or a number that is not finite."""
    if not arrivals or any(each.truth != "value" or not _is_rate(each) for each in arrivals):
        return Arrivals()
    return Arrivals(
        truth="value",
        window_s=min(each.window_s for each in arrivals),
        requests_per_s=sum(each.requests_per_s for each in arrivals),
        tokens_per_s=sum(each.tokens_per_s for each in arrivals),
        burst_window_s=min(each.burst_window_s for each in arrivals),
        burst_requests_per_s=sum(each.burst_requests_per_s for each in arrivals),
        idle_s=min(each.idle_s for each in arrivals),
    )


def _is_rate(arrivals: Arrivals) -> bool:
    rates = (arrivals.requests_per_s, arrivals.tokens_per_s, arrivals.burst_requests_per_s)
    spans = (arrivals.window_s, arrivals.burst_window_s, arrivals.idle_s)
    return all(0 <= number < math.inf for number in (*rates, *spans))


def _latencies(latencies: Sequence[Latencies]) -> Latencies:
    known = [each for each in latencies if each.truth == "value"]
    if not known:
        return Latencies()
    ttft, tpot = merged(each.ttft_ms for each in known), merged(each.tpot_ms for each in known)
    return Latencies(truth="value", ttft_ms=ttft, tpot_ms=tpot)


def _lengths(lengths: Sequence[Lengths]) -> Lengths:
    known = [each for each in lengths if each.truth == "value"]
    if not known:
        return Lengths()
    return Lengths(
        truth="value",
        prompt=merged(each.prompt for each in known),
        computed=merged(each.computed for each in known),
        output=merged(each.output for each in known),
    )
