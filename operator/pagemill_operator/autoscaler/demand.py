"""The default policy: the absolute demand of the targets and of the SLO, within windows and limits.

The checks come in this order: the replicas that the load needs; no removal while a signal is missing; the stabilization
windows; no removal while replicas start; the rate limits. The last replica is removed by a window of its own
(`scaleToZeroAfter`), which a burst does not prolong. Neighbours: `targets` and `slo` compute what the load needs.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import msgspec

from pagemill_operator.autoscaler.behavior import allowed, stabilized
from pagemill_operator.autoscaler.decision import (
    Decision,
    Goal,
    Reason,
    ReplicaCandidate,
    rate_limited,
    reason_for,
    replicas_of,
)
from pagemill_operator.autoscaler.expected_load import expected_load, is_burst
from pagemill_operator.autoscaler.memory import Memory
from pagemill_operator.autoscaler.settings import DEFAULT_POLICY, ScalingSettings, with_default_targets
from pagemill_operator.autoscaler.signals import Signals
from pagemill_operator.autoscaler.slo import SloTarget, slo_target
from pagemill_operator.autoscaler.targets import goals, is_idle

PANIC_S = 60.0
"""Nothing is removed for this long after a burst."""
SATURATED_S = 10.0
"""Requests that have waited for so long without a pause show that the maximum of replicas is too few."""
BLIND_GROWTH = 2
"""Before lengths and step times are known, an SLO orders at most this many times the replicas that serve."""


class DemandPolicy:
    """Follows the replicas that the load needs by its targets and by the SLO's prediction."""

    name: ClassVar[str] = DEFAULT_POLICY
    memory_type: ClassVar[type[Memory]] = Memory
    sees_replicas: ClassVar[bool] = False
    reads_slo: ClassVar[bool] = True

    def decide(self, settings: ScalingSettings, signals: Signals, memory: Memory) -> tuple[Decision, Memory]:
        now, before = signals.at_s, signals.fleet.wanted
        memory = (
            memory.at(now)
            .with_shape(signals)
            .with_count(signals)
            .with_waiting(signals)
            .decayed(now, settings, signals.fleet.cold_start_s)
        )
        if is_burst(signals, memory):
            memory = msgspec.structs.replace(memory, panic_until_s=now + PANIC_S)
        demand = _demand(settings, signals, memory)
        # Without all signals the demand is a lower bound, and a window of lower bounds allows no removal.
        least = before if demand.missing else 0
        settled, expected, ample = (max(least, each) for each in (demand.settled, demand.replicas, demand.ample))
        memory = memory.with_demands(now, settled, expected, ample, settings, signals.fleet.cold_start_s)
        step = _step(settings, signals, memory, demand)
        decision = Decision(
            replicas_before=before,
            replicas=step.replicas,
            reason=step.reason,
            message=step.message,
            demand=demand.replicas,
            goals=demand.goals,
            candidates=demand.candidates,
            missing=demand.missing,
            unreachable=demand.unreachable,
            panic=_panics(memory, now),
        )
        if decision.changes and settings.mode == "Active":
            memory = memory.changed(now, before, step.replicas, settings, signals.fleet.cold_start_s)
        return decision, memory


class _Demand(NamedTuple):
    """The replicas that the load needs, before windows and limits."""

    replicas: int
    settled: int
    """The replicas that the present arrivals have use for, without an expected rise and without those for a queue."""
    ample: int
    """The replicas that 1.5 times the load would have use for."""
    leading: Goal
    """The goal that asks for most."""
    goals: tuple[Goal, ...]
    candidates: tuple[ReplicaCandidate, ...]
    unbounded: int
    """The replicas that the load needs, without the bounds of the resource."""

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(goal.missing for goal in self.goals if goal.missing))

    @property
    def unreachable(self) -> str:
        return next((goal.unreachable for goal in self.goals if goal.unreachable), "")


class _Step(NamedTuple):
    """The number of replicas after windows and limits, and why."""

    replicas: int
    reason: Reason
    message: str


def _demand(settings: ScalingSettings, signals: Signals, memory: Memory) -> _Demand:
    expected = expected_load(signals, memory)
    view = slo_target(settings, settings.slo, signals, memory, expected) if settings.slo is not None else SloTarget()
    # While nothing can be predicted, the default targets stand in for the SLO.
    aims = with_default_targets(settings) if view.goal.missing else settings
    idle_s = memory.idle_s(settings, signals.fleet.cold_start_s)
    judged = [*goals(aims, signals, memory.shape, expected, idle_s), view.goal]
    leading = max(judged, key=lambda goal: (goal.needed, goal.enough))
    needed, enough = (max(getattr(goal, name) for goal in judged) for name in ("needed", "enough"))
    wanted = signals.fleet.wanted
    if settings.slo is not None and view.goal.missing:
        needed = min(needed, max(wanted, BLIND_GROWTH * max(1, signals.fleet.ready)))
    replicas = needed if wanted < needed else min(wanted, max(needed, enough))
    ample = settings.clamp(max(replicas, min(wanted, max(goal.most_used for goal in judged))))
    kept = max(goal.most_kept if goal.settled is None else goal.settled for goal in judged)
    settled = settings.clamp(min(replicas, kept))
    return _Demand(settings.clamp(replicas), settled, ample, leading, tuple(judged), view.candidates, replicas)


def _step(settings: ScalingSettings, signals: Signals, memory: Memory, demand: _Demand) -> _Step:
    wanted, needed, now = signals.fleet.wanted, demand.replicas, signals.at_s
    if not settings.lowest <= wanted <= settings.max_replicas:
        bounds = f"minReplicas {settings.min_replicas} and maxReplicas {settings.max_replicas}"
        return _Step(settings.clamp(wanted), "OutOfBounds", f"{wanted} replicas are out of bounds: {bounds}")
    if needed > wanted:
        return _up(settings, signals, memory, demand)
    if demand.missing:
        return _Step(wanted, "SignalsMissing", f"keeping {replicas_of(wanted)}: {'; '.join(demand.missing)}")
    if needed == wanted:
        return _steady(settings, signals, memory, demand)
    idle_s = memory.idle_s(settings, signals.fleet.cold_start_s)
    is_last_idle = needed == 0 and wanted == 1 and is_idle(signals, idle_s)
    if _panics(memory, now) and not is_last_idle:
        return _Step(wanted, "Panic", "nothing is removed within a minute of a burst")
    if (fleet := signals.fleet).is_awaited:
        limit = f"for at most {fleet.longest_start_s:.0f} s"
        return _Step(wanted, "ReplicasStarting", f"{fleet.starting} replicas start; none is removed meanwhile, {limit}")
    if is_last_idle:
        return _allowed(settings, signals, memory, demand, 0)
    return _down(settings, signals, memory, demand)


def _steady(settings: ScalingSettings, signals: Signals, memory: Memory, demand: _Demand) -> _Step:
    wanted, most, fleet = signals.fleet.wanted, settings.max_replicas, signals.fleet
    is_stuck = fleet.pending > 0 and fleet.starting_s >= SATURATED_S
    if wanted < most and not is_stuck:
        return _Step(wanted, "Steady", demand.leading.reason)
    if wanted >= most and (demand.unbounded > most or demand.unreachable):
        asked = f"the load needs {replicas_of(demand.unbounded)}" if demand.unbounded > most else demand.unreachable
        return _Step(wanted, "AtMaximum", f"{asked}; maxReplicas is {most}")
    since_s = memory.waiting_since_s
    if since_s is not None and signals.at_s - since_s >= SATURATED_S:
        waits = f"{signals.num_waiting} requests wait, as requests have for {signals.at_s - since_s:.0f} s"
        cap = f"maxReplicas is {most}" if wanted >= most else f"no node has room for {replicas_of(fleet.pending)}"
        return _Step(wanted, "Saturated", f"{waits}; {cap}")
    return _Step(wanted, "Steady", demand.leading.reason)


def _up(settings: ScalingSettings, signals: Signals, memory: Memory, demand: _Demand) -> _Step:
    wanted, up_s = signals.fleet.wanted, settings.up.window_s
    needed = stabilized(wanted, demand.replicas, memory.expected, signals.at_s, up_s=up_s, down_s=0.0)
    if needed == wanted:
        held = f"scaling up when that has held for {settings.up.window_s:.0f} s"
        return _Step(wanted, "Stabilizing", f"the load needs {replicas_of(demand.replicas)}; {held}")
    return _allowed(settings, signals, memory, demand, needed)


def _down(settings: ScalingSettings, signals: Signals, memory: Memory, demand: _Demand) -> _Step:
    wanted, cold_start_s = signals.fleet.wanted, signals.fleet.cold_start_s
    down_s, idle_s = memory.down_window_s(settings, cold_start_s), memory.idle_window_s(settings, cold_start_s)
    settled, expected, ample = (
        stabilized(wanted, number, history, signals.at_s, up_s=0.0, down_s=window_s)
        for number, history, window_s in (
            (demand.replicas, memory.history, down_s),
            (demand.replicas, memory.expected, idle_s),
            (demand.ample, memory.ample, idle_s),
        )
    )
    needed = min(max(settled, expected), ample)
    if needed == wanted:
        held = f"scaling down when that has held for {down_s:.0f} s"
        return _Step(wanted, "Stabilizing", f"the load needs {replicas_of(demand.replicas)}; {held}")
    # The last replica is removed by its own window.
    return _allowed(settings, signals, memory, demand, max(1, needed))


def _allowed(settings: ScalingSettings, signals: Signals, memory: Memory, demand: _Demand, needed: int) -> _Step:
    wanted = signals.fleet.wanted
    replicas = allowed(wanted, needed, memory.history, settings, signals.at_s)
    if replicas == wanted:
        return _Step(wanted, "RateLimited", rate_limited(needed))
    message = demand.leading.reason or f"minReplicas is {settings.min_replicas}"
    if num_woken := max(0, min(replicas - wanted, signals.fleet.asleep)):
        message += f"; {num_woken} of {replicas - wanted} only wake up"
    return _Step(replicas, reason_for(wanted, replicas), message)


def _panics(memory: Memory, now: float) -> bool:
    return memory.panic_until_s is not None and now < memory.panic_until_s
