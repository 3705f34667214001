"""Asks the scaling policy, periodically and when a request finds no pod, and orders the replicas."""

from __future__ import annotations

from collections.abc import Callable

from pagemill_simulator.events import Events
from pagemill_simulator.fleet.platform import Platform
from pagemill_simulator.scaling.policy import FleetScaler, FleetSnapshot, ReplicaBounds

POINT_S = 5.0
"""Seconds between two points of the timeline if nothing changes."""


class Controller:
    def __init__(
        self,
        events: Events,
        platform: Platform,
        policy: FleetScaler,
        bounds: ReplicaBounds,
        see: Callable[[], FleetSnapshot],
    ) -> None:
        """`see` returns the present state of the fleet."""
        self._events = events
        self._platform = platform
        self._policy = policy
        self._bounds = bounds
        self._see = see
        self._is_woken = False

    def begin(self) -> None:
        self._events.after(self._policy.interval_s, self._decide_regularly)
        self._events.after(POINT_S, self._note_regularly)

    def wake(self) -> None:
        """Decide at once: a request finds no pod, not even a starting one."""
        if self._policy.wakes_at_once and not self._is_woken:
            self._is_woken = True
            self._events.after(0.0, self._decide_now)

    def _decide_regularly(self) -> None:
        self._decide()
        self._events.after(self._policy.interval_s, self._decide_regularly)

    def _decide_now(self) -> None:
        self._is_woken = False
        self._decide()

    def _decide(self) -> None:
        replicas = self._policy.decide(self._see())
        self._platform.order(max(self._bounds.min_replicas, min(self._bounds.max_replicas, replicas)))

    def _note_regularly(self) -> None:
        self._platform.note()
        self._events.after(POINT_S, self._note_regularly)
