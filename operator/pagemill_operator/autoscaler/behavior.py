"""The stabilization windows and rate limits of `spec.autoscaling.behavior`.

Their names and meaning are those of HorizontalPodAutoscaler. `History` has the earlier demands and changes that windows
and limits need; it is a value that a policy keeps in its memory. Neighbours: `demand` and `target_tracking` use both.
"""

from __future__ import annotations

import math

import msgspec

from pagemill_operator.autoscaler.settings import Direction, Rule, ScalingSettings

LONGEST_GAP_S = 120.0
"""The history is discarded after a longer gap between two decisions, or where the clock went back."""
LONGEST_WINDOW_S = 3600.0
MAX_DEMANDS = 2048


class DemandSample(msgspec.Struct, frozen=True, array_like=True):
    """The demand at one time."""

    at_s: float
    replicas: int


class Change(msgspec.Struct, frozen=True, array_like=True):
    """A change of the number of replicas at one time."""

    at_s: float
    delta: int


class History(msgspec.Struct, frozen=True):
    """Earlier demands and changes."""

    at_s: float = 0.0
    """The time of the latest decision."""
    since_s: float | None = None
    """The start of the time that was watched without a gap; None: nothing was watched yet."""
    demands: tuple[DemandSample, ...] = ()
    changes: tuple[Change, ...] = ()

    def at(self, now: float) -> History:
        """Return this history, or an empty one after a gap or where the clock went back."""
        if self.since_s is not None and 0.0 <= now - self.at_s <= LONGEST_GAP_S:
            return self
        return History(at_s=now, since_s=now)

    def with_demand(self, now: float, replicas: int, keep_s: float) -> History:
        """Return the history with one more demand and without those that are older than `keep_s`."""
        kept = [each for each in self.demands if now - each.at_s <= keep_s]
        # A demand that is repeated is kept once, with the time of its latest repeat, which windows go by.
        if len(kept) > 1 and kept[-1].replicas == kept[-2].replicas == replicas:
            kept.pop()
        kept.append(DemandSample(now, replicas))
        return msgspec.structs.replace(self, at_s=now, demands=tuple(kept[-MAX_DEMANDS:]))

    def changed(self, now: float, delta: int) -> History:
        """Return the history with one more change of the number of replicas."""
        kept = [change for change in self.changes if now - change.at_s <= 2 * LONGEST_WINDOW_S]
        return msgspec.structs.replace(self, changes=(*kept, Change(now, delta)))


def stabilized(wanted: int, demand: int, history: History, now: float, *, up_s: float, down_s: float) -> int:
    """Return `demand`, or the most cautious demand of the window of its direction.

    The history must already contain this demand.
    """
    if demand > wanted:
        # Where no replica runs a request waits: the first one is added without a window.
        return max(wanted, 1, min(_within(history, up_s, wanted, demand, now)))
    if demand < wanted:
        return min(wanted, max(_within(history, down_s, wanted, demand, now)))
    return demand


def _within(history: History, window_s: float, wanted: int, demand: int, now: float) -> list[int]:
    """Return the demands of the window, and `wanted` too while less than a window has been watched."""
    if window_s <= 0:
        return [demand]
    demands = [each.replicas for each in history.demands if now - each.at_s <= window_s]
    is_watched = history.since_s is not None and now - history.since_s >= window_s
    return [demand, *demands] if is_watched else [demand, wanted, *demands]


def allowed(wanted: int, demand: int, history: History, settings: ScalingSettings, now: float) -> int:
    """Return the number of replicas nearest to `demand` that the rules of its direction allow now."""
    if demand > wanted:
        return min(demand, max(wanted, _highest(wanted, history, settings.up, now)))
    if demand < wanted:
        return max(demand, min(wanted, _lowest(wanted, history, settings.down, now)))
    return demand


def _highest(wanted: int, history: History, up: Direction, now: float) -> int:
    if up.select == "Disabled":
        return wanted
    if not up.rules:
        return 2**31
    ends = [_up(rule, wanted - _added(history, rule, now)) for rule in up.rules]
    return max(ends) if up.select == "Max" else min(ends)


def _lowest(wanted: int, history: History, down: Direction, now: float) -> int:
    if down.select == "Disabled":
        return wanted
    if not down.rules:
        return 0
    ends = [_down(rule, wanted + _removed(history, rule, now)) for rule in down.rules]
    return min(ends) if down.select == "Max" else max(ends)


def _up(rule: Rule, start: int) -> int:
    return start + rule.value if rule.type == "Pods" else math.ceil(start * (1 + rule.value / 100) - 1e-9)


def _down(rule: Rule, start: int) -> int:
    return start - rule.value if rule.type == "Pods" else math.floor(start * (1 - rule.value / 100) + 1e-9)


def _added(history: History, rule: Rule, now: float) -> int:
    return sum(change.delta for change in history.changes if change.delta > 0 and now - change.at_s < rule.period_s)


def _removed(history: History, rule: Rule, now: float) -> int:
    return -sum(change.delta for change in history.changes if change.delta < 0 and now - change.at_s < rule.period_s)
