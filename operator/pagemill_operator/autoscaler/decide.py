"""`decide`: from policy, signals and memory to a decision and the next memory. Pure.

The order is that of caution: what the goals wish for; nothing less while a number is missing; the windows; no start is
cut short; the policies. Zero has a window of its own (`scaleToZeroAfter`), which the goal of the requests goes by and
no burst before it makes longer.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pagemill_operator.autoscaler.decision import Decision, Reason, Record
from pagemill_operator.autoscaler.limits import allowed, stabilized
from pagemill_operator.autoscaler.memory import Memory
from pagemill_operator.autoscaler.policy import Policy, with_default_targets
from pagemill_operator.autoscaler.signals import Signals
from pagemill_operator.autoscaler.slo import Candidate, Outlook, is_burst, outlook
from pagemill_operator.autoscaler.wishes import Goal, goals, is_idle

PANIC_S = 60.0
"""After a burst nothing is removed for this long."""
STARTS_S = 600.0
COLD_STARTS = 2.0
"""A start is waited for this long, or for so many times what starts have taken, whichever is longer."""


class _Wished(NamedTuple):
    replicas: int
    leading: Goal
    """That asks for most."""
    goals: tuple[Goal, ...]
    candidates: tuple[Candidate, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(goal.missing for goal in self.goals if goal.missing))

    @property
    def unreachable(self) -> str:
        return next((goal.unreachable for goal in self.goals if goal.unreachable), "")


class _Step(NamedTuple):
    replicas: int
    reason: Reason
    message: str


def decide(policy: Policy, signals: Signals, memory: Memory) -> tuple[Decision, Memory]:
    """What to do now, and what to remember of it. The same input gives the same output."""
    now, before = signals.at_s, signals.fleet.wanted
    memory = memory.at(now).learned(signals).heard(signals).forgiven(now, policy)
    if is_burst(signals):
        memory = msgspec.structs.replace(memory, panic_until_s=now + PANIC_S)
    wished = _wish(policy, signals, memory)
    # What is wished for without all numbers is a lower bound: a window of it proves nothing.
    remembered = max(before, wished.replicas) if wished.missing else wished.replicas
    memory = memory.wished(now, remembered, max(policy.up.window_s, memory.down_window_s(policy)))
    step = _step(policy, signals, memory, wished)
    decision = Decision(
        replicas_before=before,
        replicas=step.replicas,
        reason=step.reason,
        message=step.message,
        wish=wished.replicas,
        goals=wished.goals,
        candidates=wished.candidates,
        missing=wished.missing,
        unreachable=wished.unreachable,
        panic=_panics(memory, now),
    )
    if decision.changes and policy.mode == "Active":
        memory = memory.changed(now, step.replicas - before, policy)
    return decision, memory


def replay(record: Record) -> Decision:
    """Decide it again."""
    return decide(record.policy, record.signals, record.memory)[0]


def _wish(policy: Policy, signals: Signals, memory: Memory) -> _Wished:
    view = outlook(policy, policy.slo, signals, memory) if policy.slo is not None else Outlook()
    # Nothing can be predicted yet: until then the load is kept in bounds as without an SLO.
    aims = with_default_targets(policy) if view.goal.missing else policy
    judged = [*goals(aims, signals, memory.shape), view.goal]
    leading = max(judged, key=lambda goal: (goal.needed, goal.enough))
    needed, enough = (max(getattr(goal, name) for goal in judged) for name in ("needed", "enough"))
    wanted = signals.fleet.wanted
    replicas = needed if wanted < needed else min(wanted, max(needed, enough))
    return _Wished(policy.clamp(replicas), leading, tuple(judged), view.candidates)


def _step(policy: Policy, signals: Signals, memory: Memory, wished: _Wished) -> _Step:
    wanted, wish, now = signals.fleet.wanted, wished.replicas, signals.at_s
    if not policy.lowest <= wanted <= policy.max_replicas:
        bounds = f"minReplicas {policy.min_replicas} and maxReplicas {policy.max_replicas}"
        return _Step(policy.clamp(wanted), "OutOfBounds", f"{wanted} replicas are out of bounds: {bounds}")
    if wish > wanted:
        return _up(policy, signals, memory, wished)
    if wished.missing:
        return _Step(wanted, "SignalsMissing", f"holding {wanted} replicas: {'; '.join(wished.missing)}")
    if wish == wanted:
        return _Step(wanted, "Steady", wished.leading.reason)
    is_last_idle = wish == 0 and wanted == 1 and is_idle(policy, signals)
    if _panics(memory, now) and not is_last_idle:
        return _Step(wanted, "Panic", "nothing is removed within a minute of a burst")
    if (starts_s := _longest_start_s(signals)) and signals.fleet.starting and signals.fleet.starting_s < starts_s:
        message = f"{signals.fleet.starting} replicas start; none is removed meanwhile, for at most {starts_s:.0f} s"
        return _Step(wanted, "ReplicasStarting", message)
    if is_last_idle:
        return _allowed(policy, signals, memory, wished, 0)
    calm = stabilized(wanted, wish, memory, policy, now)
    if calm == wanted:
        window_s = memory.down_window_s(policy)
        return _Step(wanted, "Stabilizing", f"{wish} would do; that must last {window_s:.0f} s")
    # The last one goes by its own window.
    return _allowed(policy, signals, memory, wished, max(1, calm))


def _up(policy: Policy, signals: Signals, memory: Memory, wished: _Wished) -> _Step:
    wanted = signals.fleet.wanted
    wish = stabilized(wanted, wished.replicas, memory, policy, signals.at_s)
    if wish == wanted:
        message = f"{wished.replicas} are wished for; that must last {policy.up.window_s:.0f} s"
        return _Step(wanted, "Stabilizing", message)
    return _allowed(policy, signals, memory, wished, wish)


def _allowed(policy: Policy, signals: Signals, memory: Memory, wished: _Wished, wish: int) -> _Step:
    wanted = signals.fleet.wanted
    replicas = allowed(wanted, wish, memory, policy, signals.at_s)
    if replicas == wanted:
        return _Step(wanted, "RateLimited", f"{wish} are wished for; spec.autoscaling.behavior does not allow it yet")
    words = wished.leading.reason or "the least that is allowed"
    if num_woken := max(0, min(replicas - wanted, signals.fleet.asleep)):
        words += f"; {num_woken} of {replicas - wanted} only wake up"
    if replicas == 0:
        return _Step(0, "ScaledToZero", words)
    if wanted == 0:
        return _Step(replicas, "Woken", words)
    return _Step(replicas, "ScaledUp" if replicas > wanted else "ScaledDown", words)


def _panics(memory: Memory, now: float) -> bool:
    return memory.panic_until_s is not None and now < memory.panic_until_s


def _longest_start_s(signals: Signals) -> float:
    return max(STARTS_S, COLD_STARTS * (signals.fleet.cold_start_s or 0.0))
