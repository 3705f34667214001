"""What a decision is made from: the replicas as they are, and the load as all gateways together report it.

All gateways follow the same engines, so of those the best report counts; their queues, arrivals and latencies add up.
What is missing stays missing: without a gateway's report the sums over gateways are lower bounds, and say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from pagemill_protocol.histogram import merged
from pagemill_protocol.load import Arrivals, DeploymentLoad, EngineHeld, EnginesLoad, Latencies, Lengths, QueueLoad
from pagemill_protocol.state import StepTimeParams


class Shape(msgspec.Struct, frozen=True):
    """The capacity of one replica; it stays true while there is none."""

    num_blocks: int
    block_size: int
    max_num_seqs: int = 0
    """0: not reported."""
    max_step_tokens: int = 0
    step_time: StepTimeParams = StepTimeParams()

    @property
    def num_tokens(self) -> int:
        """That its KV cache holds."""
        return self.num_blocks * self.block_size


class Fleet(msgspec.Struct, frozen=True):
    """Replicas of the plan."""

    wanted: int
    """As they were ordered last."""
    ready: int = 0
    loading: int = 0
    """They run and are not ready."""
    pending: int = 0
    """They have no node yet."""
    asleep: int = 0
    """They are loaded and sleep: no capacity, and awake before any other could be started."""
    starting_s: float = 0.0
    """For how long the oldest of those that start has been starting."""
    cold_start_s: float | None = None
    """From the order to ready, as learned; None: no start was seen yet."""

    @property
    def starting(self) -> int:
        return self.loading + self.pending


class ReplicaLoad(msgspec.Struct, frozen=True, array_like=True):
    """One engine that reports."""

    id: str
    num_running: int
    num_waiting: float
    """In the engine's own queue."""
    kv_cache_usage: float | None = None
    """Share of its blocks that running requests hold; None: not reported."""


class Signals(msgspec.Struct, frozen=True):
    """Everything that is known at one instant."""

    at_s: float
    """The reading of a clock that only goes forward."""
    fleet: Fleet
    num_gateways: int = 1
    num_reporting: int = 0
    """Gateways that report; their numbers are in here."""
    engines: EnginesLoad = EnginesLoad()
    queue: QueueLoad = QueueLoad()
    arrivals: Arrivals = Arrivals()
    latencies: Latencies = Latencies()
    lengths: Lengths = Lengths()
    replicas: tuple[ReplicaLoad, ...] = ()
    """Each engine by itself, for policies that ask for it."""

    @property
    def is_whole(self) -> bool:
        """Every gateway reports: sums over them are no lower bounds."""
        return 0 < self.num_gateways <= self.num_reporting

    @property
    def missing(self) -> str:
        """What is not known, without which load may be higher than it looks; empty: nothing."""
        if not self.is_whole:
            return f"{self.num_reporting} of {self.num_gateways} gateways report"
        if self.engines.truth != "value":
            return f"the engines' reports are {self.engines.truth}"
        if self.arrivals.truth != "value":
            return f"the arrivals are {self.arrivals.truth}"
        return ""

    @property
    def num_requests(self) -> int:
        """Anywhere in the system."""
        engines = self.engines
        return engines.num_requests_running + engines.num_requests_waiting + self.queue.num_requests

    @property
    def num_waiting(self) -> int:
        return self.engines.num_requests_waiting + self.queue.num_requests


class View(msgspec.Struct, frozen=True):
    """What one gateway reported, and how long ago."""

    load: DeploymentLoad
    age_s: float = 0.0


def merge(
    views: Sequence[View], fleet: Fleet, *, num_gateways: int, at_s: float, has_replicas: bool = False
) -> Signals:
    """`num_gateways`: those that serve. `has_replicas`: each engine by itself, too."""
    loads = [view.load for view in views]
    return Signals(
        at_s=at_s,
        fleet=fleet,
        num_gateways=num_gateways,
        num_reporting=len(views),
        engines=_engines(views, fleet),
        queue=_queue([load.queue for load in loads]),
        arrivals=_arrivals([load.arrivals for load in loads]),
        latencies=_latencies([load.latencies for load in loads]),
        lengths=_lengths([load.lengths for load in loads]),
        replicas=_replicas(loads) if has_replicas else (),
    )


def shape_of(engines: EnginesLoad) -> Shape | None:
    """None: no engine reports its size."""
    if engines.truth == "unknown" or engines.num_reporting <= 0 or engines.num_blocks_total <= 0:
        return None
    return Shape(
        num_blocks=max(1, engines.num_blocks_total // engines.num_reporting),
        block_size=max(1, engines.block_size),
        max_num_seqs=max(0, engines.max_num_seqs),
        max_step_tokens=max(0, engines.max_step_tokens),
        step_time=engines.step_time,
    )


def most_held(loads: Iterable[DeploymentLoad]) -> dict[str, EngineHeld]:
    """By engine, the most that any gateway reports of it."""
    held: dict[str, EngineHeld] = {}
    for engine in (engine for load in loads for engine in load.held):
        held[engine.id] = max(held.get(engine.id, engine), engine, key=weight)
    return held


def weight(engine: EngineHeld) -> tuple[int, int]:
    """What is held in KV blocks must be computed again elsewhere, or waited for."""
    return engine.num_blocks_active, engine.num_requests


def _replicas(loads: Sequence[DeploymentLoad]) -> tuple[ReplicaLoad, ...]:
    return tuple(_replica(engine) for _, engine in sorted(most_held(loads).items()))


def _replica(engine: EngineHeld) -> ReplicaLoad:
    waiting = min(max(0, engine.num_requests_waiting), max(0, engine.num_requests))
    total, active = engine.num_blocks_total, max(0, engine.num_blocks_active)
    usage = min(1.0, active / total) if total > 0 else None
    return ReplicaLoad(engine.id, max(0, engine.num_requests) - waiting, waiting, usage)


def _engines(views: Sequence[View], fleet: Fleet) -> EnginesLoad:
    if not views:
        return EnginesLoad()
    order = {"unknown": 0, "stale": 1, "value": 2}
    best = max(
        views, key=lambda v: (order[v.load.engines.truth], v.load.engines.num_reporting, -v.age_s - _age(v.load))
    )
    reported = best.load.engines
    engines = msgspec.structs.replace(
        reported, age_s=round(best.age_s + _age(best.load), 3), step_time=_readable(reported.step_time)
    )
    if not is_sound(engines):
        return EnginesLoad()
    # Engines that the platform calls ready and that report to no gateway are not idle: what they do is not known.
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
    """Unknown where a number is not finite: no record could hold it, as JSON has no such number."""
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
    """Unknown as soon as one gateway reports none, or something that is not finite."""
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
