"""Planned numbers of replicas over time, and the scaler that orders them.

`trials` simulates a schedule; `clairvoyant` searches among them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from pagemill_simulator.fleet.outcome import FleetPoint
from pagemill_simulator.scaling.policy import FleetSnapshot

GRID_S = 2.0
"""Orders are on this grid of seconds, like the operator's."""


class Order(NamedTuple):
    at_s: float
    replicas: int


class Schedule(NamedTuple):
    """Each order applies from its time on; the first is at 0."""

    orders: tuple[Order, ...]

    @classmethod
    def of(cls, orders: Sequence[Order]) -> Schedule:
        """Return a schedule on the grid, without orders that change nothing; of several at one time the last counts."""
        latest = {max(0.0, round(at_s / GRID_S) * GRID_S): replicas for at_s, replicas in orders}
        rising = [Order(at_s, latest[at_s]) for at_s in sorted(latest)]
        changes = [after for before, after in pairwise(rising) if before.replicas != after.replicas]
        return cls((*rising[:1], *changes))

    @classmethod
    def constant(cls, replicas: int) -> Schedule:
        return cls((Order(0.0, replicas),))

    @classmethod
    def ordered(cls, timeline: Sequence[FleetPoint]) -> Schedule:
        """Return the schedule that a policy ordered in a simulation."""
        return cls.of([Order(0.0, timeline[0].wanted), *(Order(point.at_s, point.wanted) for point in timeline)])

    @classmethod
    def ready_at(cls, ready: Sequence[int], window_s: float, ahead_s: float) -> Schedule:
        """Return a schedule with `ready` replicas ready in each window of `window_s`, each ordered `ahead_s` earlier.

        Replicas stay if they are needed again before a new one could be ready.
        """
        step_s = GRID_S
        while step_s * 2 <= window_s / 8:
            step_s *= 2
        orders = []
        for step in range(round(len(ready) * window_s / step_s)):
            first, last = int(step * step_s / window_s), int((step * step_s + ahead_s) / window_s)
            orders.append(Order(step * step_s, max(ready[first : last + 1])))
        return cls.of(orders)

    def at(self, at_s: float) -> int:
        place = bisect_right(self.orders, at_s + GRID_S / 4, key=lambda order: order.at_s)
        return self.orders[max(0, place - 1)].replicas


class ScheduledReplicas:
    """Orders a fixed schedule. Implements `scaling.policy.FleetScaler`."""

    interval_s = GRID_S
    wakes_at_once = True

    def __init__(self, name: str, schedule: Schedule) -> None:
        self.name = name
        self._schedule = schedule

    def decide(self, seen: FleetSnapshot) -> int:
        return self._schedule.at(seen.at_s)
