"""What each goal of a policy would have: how many replicas it needs, and down to how many it could do without.

`needed` is what the goal asks for now; `enough` is the most that it still has use for: as many as the load with a tenth
added would need. Between the two a goal is content, so noise around a border moves nothing. A goal that lacks a number
says which: missing is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from pagemill_operator.autoscaler.memory import Shape
from pagemill_operator.autoscaler.policy import DEFAULT_KV_CACHE_USAGE, Policy
from pagemill_operator.autoscaler.signals import Signals

MARGIN = 1.1
"""Load that must fit as well before a replica is removed."""


class Goal(msgspec.Struct, frozen=True):
    name: str
    needed: int = 0
    enough: int = 0
    reason: str = ""
    missing: str = ""
    """The number without which it cannot be judged; `needed` is then a lower bound."""
    unreachable: str = ""
    """Why no number of replicas meets it."""


def goals(policy: Policy, signals: Signals, shape: Shape | None) -> Iterator[Goal]:
    """Those that go by load; the SLO's is `slo.goal`."""
    yield _anybody(policy, signals)
    yield _kv_cache(policy, signals, shape)
    yield _seats(signals, shape)
    if policy.queue_depth is not None:
        yield _queue(policy.queue_depth, signals)


def is_idle(policy: Policy, signals: Signals) -> bool:
    """Nobody has asked for long enough, as every gateway and every engine says."""
    known = signals.is_whole and signals.arrivals.truth == "value" and signals.engines.truth == "value"
    return known and signals.num_requests == 0 and signals.arrivals.idle_s >= policy.idle_s


def _anybody(policy: Policy, signals: Signals) -> Goal:
    """One replica while there is somebody, or was lately."""
    missing = ""
    if not signals.is_whole:
        missing = f"{signals.num_heard} of {signals.num_gateways} gateways are heard"
    elif signals.engines.truth != "value":
        missing = f"the engines' reports are {signals.engines.truth}"
    elif signals.arrivals.truth != "value":
        missing = f"the arrivals are {signals.arrivals.truth}"
    if signals.queue.num_requests and not signals.fleet.wanted:
        return Goal("requests", 1, 1, f"{signals.queue.num_requests} requests wait and no replica runs", missing)
    if signals.num_requests:
        return Goal("requests", 1, 1, f"{signals.num_requests} requests are in the system", missing)
    if is_idle(policy, signals):
        return Goal("requests", 0, 0, f"no request for {signals.arrivals.idle_s:.0f} s")
    # What nobody ever asked for since the gateway came is no reason to start, only one to stay.
    needed = min(1, signals.fleet.wanted)
    return Goal("requests", needed, needed, f"the latest request was {signals.arrivals.idle_s:.0f} s ago", missing)


def _kv_cache(policy: Policy, signals: Signals, shape: Shape | None) -> Goal:
    """Blocks of running requests, and those that the waiting will take."""
    engines, queue = signals.engines, signals.queue
    if shape is None:
        return _without_shape("kvCacheUsage", signals)
    waiting = -(-(engines.num_tokens_waiting + queue.num_tokens) // shape.block_size)
    demand = (engines.num_blocks_active + waiting) / shape.num_blocks
    target = policy.kv_cache_usage or DEFAULT_KV_CACHE_USAGE
    reason = f"active and waiting KV blocks fill {demand:.2f} replicas, {target:.0%} of each is aimed at"
    needed = _ceil(demand / target) if policy.kv_cache_usage is not None else 0
    return Goal("kvCacheUsage", needed, max(needed, _ceil(demand * MARGIN / target)), reason)


def _without_shape(name: str, signals: Signals) -> Goal:
    """Nothing was ever heard of an engine: with replicas there that is missing, without it is no question."""
    return Goal(name, missing="no engine has told its size yet" if signals.fleet.ready else "")


def _seats(signals: Signals, shape: Shape | None) -> Goal:
    """Requests that may run at once: adds nothing by itself, but keeps what is in use."""
    if shape is None or shape.max_num_seqs <= 0:
        return Goal("seats")
    enough = _ceil(signals.num_requests * MARGIN / shape.max_num_seqs)
    return Goal("seats", 0, enough, f"{signals.num_requests} requests for {shape.max_num_seqs} seats a replica")


def _queue(depth: int, signals: Signals) -> Goal:
    waiting = signals.num_waiting
    reason = f"{waiting} requests wait, {depth} a replica are aimed at"
    if depth == 0:
        needed = signals.fleet.ready + 1 if waiting else 0
        return Goal("queueDepth", needed, needed, reason)
    return Goal("queueDepth", _ceil(waiting / depth), _ceil(waiting * MARGIN / depth), reason)


def _ceil(value: float) -> int:
    """Up, but not for a rounding error."""
    return max(0, math.ceil(value - 1e-9))
