"""Target tracking: the algorithm of HorizontalPodAutoscaler, which multiplies replicas by measured value over target.

`kvCacheUsage` is the mean of the engines that report, and `queueDepth` the waiting requests for each replica; the
larger result counts. Windows and rate limits are those of `spec.autoscaling.behavior`. The policy predicts nothing,
reads no SLO and has no rule for bursts. No ratio describes zero replicas: `scaleToZeroAfter` removes the last one.

Source: Kubernetes, autoscaling/v2, https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/
(algorithm details). Neighbour: `demand`, the default.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

from pagemill_operator.autoscaler.behavior import History, allowed, stabilized
from pagemill_operator.autoscaler.decision import Decision, Goal, Reason, rate_limited, reason_for, replicas_of
from pagemill_operator.autoscaler.settings import ScalingSettings, with_default_targets
from pagemill_operator.autoscaler.signals import Signals
from pagemill_operator.autoscaler.targets import is_idle

TOLERANCE = 0.1
"""The distance of the ratio from 1 within which the number of replicas is kept."""


class TargetTracking:
    """Sets the replicas by the ratio of each measured value to its target."""

    name: ClassVar[str] = "TargetTracking"
    memory_type: ClassVar[type[History]] = History
    sees_replicas: ClassVar[bool] = False
    reads_slo: ClassVar[bool] = False

    def decide(self, settings: ScalingSettings, signals: Signals, memory: History) -> tuple[Decision, History]:
        now, wanted = signals.at_s, signals.fleet.wanted
        goals = tuple(_goals(with_default_targets(settings), signals))
        unbounded = max(goal.needed for goal in goals)
        demand = settings.clamp(unbounded)
        missing = tuple(dict.fromkeys(goal.missing for goal in goals if goal.missing))
        # Without all signals the demand is a lower bound.
        keep_s = max(settings.up.window_s, settings.down.window_s)
        history = memory.at(now).with_demand(now, max(wanted, demand) if missing else demand, keep_s)
        replicas, reason, message = _follow(settings, signals, history, unbounded, goals)
        decision = Decision(wanted, replicas, reason, message, demand=demand, goals=goals, missing=missing)
        if decision.changes and settings.mode == "Active":
            history = history.changed(now, replicas - wanted)
        return decision, history


def pods_metric(total: float, num_pods: int, num_silent: int, target: float, current: int, tolerance: float) -> int:
    """Return the replicas that would bring the mean of a metric of pods to its target.

    `total` is the sum over `num_pods`; `num_silent` more pods have no metric. Those count as idle where the others ask
    for more replicas, and as on target where they ask for fewer; a change in the other direction is not made. Without
    any metric the number is kept.
    """
    if not num_pods:
        return current
    ratio = total / num_pods / target
    if not num_silent:
        return current if abs(1 - ratio) <= tolerance else math.ceil(ratio * num_pods)
    assumed = target if ratio < 1 else 0.0
    count = num_pods + num_silent
    careful = (total + assumed * num_silent) / count / target
    turned = (ratio < 1 < careful) or (careful < 1 < ratio)
    if turned or abs(1 - careful) <= tolerance:
        return current
    replicas = math.ceil(careful * count)
    # The counted pods may differ from the wanted ones, so the result could lie on the wrong side of `current`.
    against = (careful < 1 and replicas > current) or (careful > 1 and replicas < current)
    return current if against else replicas


def external_metric(total: float, target: float, current: int, tolerance: float) -> int:
    """Return the replicas among which the total is `target` for each."""
    return current if abs(1 - total / (target * current)) <= tolerance else math.ceil(total / target)


def _goals(settings: ScalingSettings, signals: Signals) -> Iterator[Goal]:
    yield _requests(settings, signals)
    if settings.kv_cache_usage is not None:
        yield _kv_cache(settings.kv_cache_usage, signals)
    if settings.queue_depth is not None:
        yield _queue(settings.queue_depth, signals)


def _requests(settings: ScalingSettings, signals: Signals) -> Goal:
    """Return the goal of the requests: one replica, or none while the deployment is idle or at zero without any."""
    missing, idle_s = signals.missing, signals.quiet_s
    if is_idle(signals, settings.idle_s):
        return Goal("requests", 0, 0, f"no request for {idle_s:.0f} s")
    if not signals.fleet.wanted and not signals.num_requests:
        return Goal("requests", 0, 0, "no request", missing)
    return Goal("requests", 1, 1, f"{signals.num_requests} requests are in the system", missing)


def _kv_cache(target: float, signals: Signals) -> Goal:
    engines, wanted = signals.engines, signals.fleet.wanted
    if engines.num_reporting <= 0 or engines.num_kv_bytes_total <= 0:
        missing = "no engine reports its KV cache" if signals.fleet.ready else ""
        return Goal("kvCacheUsage", wanted, wanted, "no replica is ready yet" if wanted else "", missing)
    usage = engines.num_kv_bytes_active / engines.num_kv_bytes_total
    num_silent = max(0, wanted - engines.num_reporting)
    total = usage * engines.num_reporting
    needed = pods_metric(total, engines.num_reporting, num_silent, target, wanted, TOLERANCE)
    return Goal("kvCacheUsage", needed, needed, f"{usage:.0%} of the KV cache is in use; the target is {target:.0%}")


def _queue(target: int, signals: Signals) -> Goal:
    fleet, waiting = signals.fleet, signals.num_waiting
    reason = f"{waiting} requests wait; the target is {target} for each replica"
    if not waiting:
        return Goal("queueDepth", 0, 0, reason)
    # A target of 0 has no ratio: while a request waits, one replica more than are ready is needed.
    needed = external_metric(waiting, target, max(1, fleet.wanted), TOLERANCE) if target else fleet.ready + 1
    return Goal("queueDepth", needed, needed, reason)


def _follow(
    settings: ScalingSettings, signals: Signals, history: History, unbounded: int, goals: Sequence[Goal]
) -> tuple[int, Reason, str]:
    wanted, now, demand = signals.fleet.wanted, signals.at_s, settings.clamp(unbounded)
    leading = max(goals, key=lambda goal: goal.needed)
    missing = [goal.missing for goal in goals if goal.missing]
    if not settings.lowest <= wanted <= settings.max_replicas:
        bounds = f"minReplicas {settings.min_replicas} and maxReplicas {settings.max_replicas}"
        return settings.clamp(wanted), "OutOfBounds", f"{wanted} replicas are out of bounds: {bounds}"
    if missing and demand <= wanted:
        return wanted, "SignalsMissing", f"keeping {replicas_of(wanted)}: {missing[0]}"
    if unbounded > wanted == settings.max_replicas:
        asked = f"the load needs {replicas_of(unbounded)}"
        return wanted, "AtMaximum", f"{asked}: {leading.reason}; maxReplicas is {settings.max_replicas}"
    if demand == wanted:
        return wanted, "Steady", leading.reason
    up_s, down_s = settings.up.window_s, settings.down.window_s
    # The last replica is removed by `scaleToZeroAfter`, not by the window.
    is_last = demand == 0 and wanted == 1
    calm = 0 if is_last else stabilized(wanted, demand, history, now, up_s=up_s, down_s=down_s)
    if calm == wanted:
        held = f"scaling up when that has held for {up_s:.0f} s"
        if demand < wanted:
            held = f"scaling down when that has held for {down_s:.0f} s"
        return wanted, "Stabilizing", f"the load needs {replicas_of(demand)}; {held}"
    replicas = allowed(wanted, calm, history, settings, now)
    if replicas == wanted:
        return wanted, "RateLimited", rate_limited(calm)
    return replicas, reason_for(wanted, replicas), leading.reason or f"minReplicas is {settings.min_replicas}"
