"""What a decision is made from: the replicas as they are, and the load as all gateways together tell it.

Gateways hear the same engines, so of those the best view counts; their queues, arrivals and latencies add up. What is
missing stays missing: a gateway that is not heard makes its own numbers a lower bound, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pagemill_protocol.histogram import merged
from pagemill_protocol.load import Arrivals, DeploymentLoad, EnginesLoad, Latencies, Lengths, QueueLoad
from pagemill_protocol.state import StepTimeParams


class Fleet(msgspec.Struct, frozen=True):
    """Replicas of the plan."""

    wanted: int
    """As they were ordered last."""
    ready: int = 0
    loading: int = 0
    """They run and are not ready."""
    pending: int = 0
    """They have no place yet."""
    asleep: int = 0
    """They are loaded and sleep: no capacity, and awake before any other could be started."""
    starting_s: float = 0.0
    """How long the one that starts longest has been at it."""
    cold_start_s: float | None = None
    """From the order to ready, as learned; None: no start was seen yet."""

    @property
    def starting(self) -> int:
        return self.loading + self.pending


class Signals(msgspec.Struct, frozen=True):
    """Everything of one instant."""

    at_s: float
    """Of a clock that only goes forward."""
    fleet: Fleet
    num_gateways: int = 1
    num_heard: int = 0
    """Gateways whose numbers are in here."""
    engines: EnginesLoad = EnginesLoad()
    queue: QueueLoad = QueueLoad()
    arrivals: Arrivals = Arrivals()
    latencies: Latencies = Latencies()
    lengths: Lengths = Lengths()

    @property
    def is_whole(self) -> bool:
        """Every gateway is heard: sums over them are no lower bounds."""
        return 0 < self.num_gateways <= self.num_heard

    @property
    def num_requests(self) -> int:
        """Anywhere in the system."""
        engines = self.engines
        return engines.num_requests_running + engines.num_requests_waiting + self.queue.num_requests

    @property
    def num_waiting(self) -> int:
        return self.engines.num_requests_waiting + self.queue.num_requests


class View(msgspec.Struct, frozen=True):
    """What one gateway told, and how long ago."""

    load: DeploymentLoad
    age_s: float = 0.0


def merge(views: Sequence[View], fleet: Fleet, *, num_gateways: int, at_s: float) -> Signals:
    """`num_gateways`: those that serve."""
    loads = [view.load for view in views]
    return Signals(
        at_s=at_s,
        fleet=fleet,
        num_gateways=num_gateways,
        num_heard=len(views),
        engines=_engines(views, fleet),
        queue=_queue([load.queue for load in loads]),
        arrivals=_arrivals([load.arrivals for load in loads]),
        latencies=_latencies([load.latencies for load in loads]),
        lengths=_lengths([load.lengths for load in loads]),
    )


def _engines(views: Sequence[View], fleet: Fleet) -> EnginesLoad:
    if not views:
        return EnginesLoad()
    order = {"unknown": 0, "stale": 1, "value": 2}
    best = max(
        views, key=lambda v: (order[v.load.engines.truth], v.load.engines.num_reporting, -v.age_s - _age(v.load))
    )
    told = best.load.engines
    engines = msgspec.structs.replace(
        told, age_s=round(best.age_s + _age(best.load), 3), step_time=_readable(told.step_time)
    )
    if not is_sound(engines):
        return EnginesLoad()
    # Engines that the platform calls ready and no gateway hears are not idle: nobody knows what they do.
    if engines.truth == "value" and engines.num_reporting < fleet.ready:
        truth = "stale" if engines.num_reporting else "unknown"
        return msgspec.structs.replace(engines, truth=truth)
    return engines


def is_sound(engines: EnginesLoad) -> bool:
    counts = (
        engines.num_blocks_total,
        engines.num_blocks_active,
        engines.num_requests_running,
        engines.num_requests_waiting,
        engines.num_tokens_running,
        engines.num_tokens_waiting,
    )
    return all(count >= 0 for count in counts) and math.isfinite(engines.age_s)


def _readable(step_time: StepTimeParams) -> StepTimeParams:
    """Unknown where a number is none: no record could hold it, as JSON has no word for it."""
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


def _queue(queues: Sequence[QueueLoad]) -> QueueLoad:
    oldest = [queue.oldest_s for queue in queues if queue.oldest_s is not None and math.isfinite(queue.oldest_s)]
    return QueueLoad(
        num_requests=sum(max(0, queue.num_requests) for queue in queues),
        num_bytes=sum(max(0, queue.num_bytes) for queue in queues),
        num_tokens=sum(max(0, queue.num_tokens) for queue in queues),
        oldest_s=max(oldest, default=None),
        needs_engine=any(queue.needs_engine for queue in queues),
    )


def _arrivals(arrivals: Sequence[Arrivals]) -> Arrivals:
    """Unknown as soon as one does not tell, or tells what is no number."""
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
