"""How fast a wish may be followed: stabilization windows and policies, as HorizontalPodAutoscaler has them."""

from __future__ import annotations

import math

from pagemill_operator.autoscaler.memory import Memory
from pagemill_operator.autoscaler.policy import Direction, Policy, Rule


def stabilized(wanted: int, wish: int, memory: Memory, policy: Policy, now: float) -> int:
    """`wish`, or the most cautious wish of the window in its direction. The memory holds this wish already."""
    if wish > wanted:
        # Where nothing runs somebody waits: one is never too rash.
        return max(wanted, 1, min(_within(memory, policy.up.window_s, wanted, wish, now)))
    if wish < wanted:
        return min(wanted, max(_within(memory, memory.down_window_s(policy), wanted, wish, now)))
    return wish


def _within(memory: Memory, window_s: float, wanted: int, wish: int, now: float) -> list[int]:
    """The wishes of the window; what is wanted is one of them while less than a window has been watched."""
    if window_s <= 0:
        return [wish]
    wishes = [each.replicas for each in memory.wishes if now - each.at_s <= window_s]
    is_watched = memory.since_s is not None and now - memory.since_s >= window_s
    return [wish, *wishes] if is_watched else [wish, wanted, *wishes]


def allowed(wanted: int, wish: int, memory: Memory, policy: Policy, now: float) -> int:
    """`wish` as far as the direction's policies let it go at once."""
    if wish > wanted:
        return min(wish, max(wanted, _highest(wanted, memory, policy.up, now)))
    if wish < wanted:
        return max(wish, min(wanted, _lowest(wanted, memory, policy.down, now)))
    return wish


def _highest(wanted: int, memory: Memory, up: Direction, now: float) -> int:
    if up.select == "Disabled":
        return wanted
    if not up.rules:
        return 2**31
    ends = [_up(rule, wanted - _added(memory, rule, now)) for rule in up.rules]
    return max(ends) if up.select == "Max" else min(ends)


def _lowest(wanted: int, memory: Memory, down: Direction, now: float) -> int:
    if down.select == "Disabled":
        return wanted
    if not down.rules:
        return 0
    ends = [_down(rule, wanted + _removed(memory, rule, now)) for rule in down.rules]
    return min(ends) if down.select == "Max" else max(ends)


def _up(rule: Rule, start: int) -> int:
    return start + rule.value if rule.type == "Pods" else math.ceil(start * (1 + rule.value / 100) - 1e-9)


def _down(rule: Rule, start: int) -> int:
    return start - rule.value if rule.type == "Pods" else math.floor(start * (1 - rule.value / 100) + 1e-9)


def _added(memory: Memory, rule: Rule, now: float) -> int:
    return sum(change.delta for change in memory.changes if change.delta > 0 and now - change.at_s < rule.period_s)


def _removed(memory: Memory, rule: Rule, now: float) -> int:
    return -sum(change.delta for change in memory.changes if change.delta < 0 and now - change.at_s < rule.period_s)
