"""The goals of the targets: how many replicas each target needs, and how many it has use for.

`needed` is what the target needs now, and `enough` what it would need at 1.1 times the load. Between the two numbers a
target asks for no change, so noise around a boundary changes nothing. A goal whose signal is missing names it: missing
is not zero. Where it is known how much of the queue will be left when a replica could serve (`expected_load`), that
counts instead of the present queue. Neighbours: `slo` has the goal of the SLO; `demand` combines all goals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pagemill_operator.autoscaler.decision import Goal
from pagemill_operator.autoscaler.expected_load import ExpectedLoad
from pagemill_operator.autoscaler.settings import DEFAULT_KV_CACHE_USAGE, ScalingSettings
from pagemill_operator.autoscaler.signals import Signals
from pagemill_protocol.report.shape import Shape

MARGIN, AMPLE = 1.1, 1.5
"""Multiples of the load that must fit before a replica is removed: after the whole window, and after the idle one."""


def goals(
    settings: ScalingSettings, signals: Signals, shape: Shape | None, expected: ExpectedLoad, idle_s: float
) -> Iterator[Goal]:
    """Yield all goals but the SLO's. `idle_s`: the time without a request after which the last replica is removed."""
    yield _requests(signals, idle_s)
    yield _kv_cache(settings, signals, shape, expected)
    yield _capacity(signals, shape)
    if settings.queue_depth is not None:
        yield _queue(settings.queue_depth, signals, expected)


def is_idle(signals: Signals, idle_s: float) -> bool:
    """Whether all gateways and engines report that there was no request for `idle_s` seconds."""
    return not signals.missing and signals.num_requests == 0 and signals.quiet_s >= idle_s


def _requests(signals: Signals, idle_s: float) -> Goal:
    """Return the goal of the requests: one replica while there are any, or were within `idle_s`."""
    missing = signals.missing
    if signals.queue.num_requests and not signals.fleet.wanted:
        return Goal("requests", 1, 1, f"{signals.queue.num_requests} requests wait and no replica runs", missing)
    if signals.num_requests:
        return Goal("requests", 1, 1, f"{signals.num_requests} requests are in the system", missing)
    if is_idle(signals, idle_s):
        return Goal("requests", 0, 0, f"no request for {signals.quiet_s:.0f} s")
    # A gateway that has just started reports a short time without requests: that keeps a replica and starts none.
    needed = min(1, signals.fleet.wanted)
    return Goal("requests", needed, needed, f"the latest request or start was {signals.quiet_s:.0f} s ago", missing)


def _kv_cache(settings: ScalingSettings, signals: Signals, shape: Shape | None, expected: ExpectedLoad) -> Goal:
    """Return the goal of `kvCacheUsage`: bytes of running requests, and of those that will still wait."""
    engines, queue = signals.engines, signals.queue
    if shape is None:
        # The size of a replica is missing only if there is one.
        return Goal("kvCacheUsage", missing="no engine has reported its size yet" if signals.fleet.ready else "")
    tokens = (engines.num_tokens_waiting + queue.num_tokens) * min(1.0, _share_left(signals, expected))
    waiting = shape.bytes_to_hold(tokens, signals.num_requests)
    demand = (engines.num_kv_bytes_active + waiting) / shape.num_bytes
    target = settings.kv_cache_usage or DEFAULT_KV_CACHE_USAGE
    reason = f"active and waiting requests fill {demand:.2f} KV caches of a replica; the target is {target:.0%} of each"
    needed = _ceil(demand / target) if settings.kv_cache_usage is not None else 0
    enough, ample = (max(needed, _ceil(demand * factor / target)) for factor in (MARGIN, AMPLE))
    return Goal("kvCacheUsage", needed, enough, reason, ample=ample)


def _capacity(signals: Signals, shape: Shape | None) -> Goal:
    """Return the goal of the requests that may run at once: it orders no replica, and keeps those in use."""
    if shape is None or shape.max_num_seqs <= 0:
        return Goal("maxNumSeqs")
    enough, ample = (_ceil(signals.num_requests * factor / shape.max_num_seqs) for factor in (MARGIN, AMPLE))
    reason = f"{signals.num_requests} requests; a replica runs at most {shape.max_num_seqs} at once"
    return Goal("maxNumSeqs", 0, enough, reason, ample=ample)


def _queue(depth: int, signals: Signals, expected: ExpectedLoad) -> Goal:
    waiting, left = signals.num_waiting, expected.num_waiting
    reason = f"{waiting} requests wait; the target is {depth} for each replica"
    serving, serving_more = expected.replicas_to_serve(), expected.replicas_to_serve(MARGIN)
    if serving is not None and serving_more is not None:
        reason += f"; {left:.0f} will when a replica ordered now could serve, in {expected.horizon_s:.0f} s"
    if depth == 0:
        needed = signals.fleet.ready + 1 if left >= 1 else 0
        return Goal("queueDepth", needed, needed, reason)
    needed, enough = _ceil(left / depth), _ceil(left * MARGIN / depth)
    if serving is not None and serving_more is not None:
        # Replicas beyond those that serve all arrivals and the queue would not shorten it.
        needed, enough = min(needed, serving), min(enough, serving_more)
    return Goal("queueDepth", needed, max(needed, enough), reason)


def _share_left(signals: Signals, expected: ExpectedLoad) -> float:
    """Return the share of the waiting requests that will still wait."""
    return expected.num_waiting / signals.num_waiting if signals.num_waiting else 1.0


def _ceil(value: float) -> int:
    """Round up, except for a rounding error."""
    return max(0, math.ceil(value - 1e-9))
