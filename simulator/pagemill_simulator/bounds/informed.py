"""A policy without foresight that learns of every change of the traffic at once: the bound of what a real one can
reach.

It knows the rate and slope behind the arrivals, but not the drawn arrivals; the capacity of its replicas (`capacity`);
the waiting requests; and the length of a start. It orders what the rate will need when a replica is ready, and more
while the waiting requests are worth more than the replicas cost. It removes what the rate no longer needs at once.
`clairvoyant` knows every request.
"""

from __future__ import annotations

import math

from pagemill_simulator.bounds.capacity import SteadyCapacity
from pagemill_simulator.bounds.schedule import GRID_S
from pagemill_simulator.scaling.policy import FleetSnapshot
from pagemill_simulator.workloads.generator import Generator

PRICE = 3.0
"""What a request within the SLO is worth, as a multiple of its cost on fully used replicas."""
SLOPE_S = 10.0
"""Seconds before the present over which the slope of the rate is taken."""


class Informed:
    """Implements `scaling.policy.FleetScaler` for one run."""

    name = "informed"
    interval_s = GRID_S
    wakes_at_once = True

    def __init__(self, traffic: Generator, capacity: SteadyCapacity, cold_start_s: float, most_replicas: int) -> None:
        self._traffic = traffic
        self._capacity = capacity
        self._cold_start_s = cold_start_s
        self._most = most_replicas
        self._extra = 0
        """Replicas ordered for waiting requests."""

    def decide(self, seen: FleetSnapshot) -> int:
        rate = self._traffic.intensity_at(seen.at_s)
        before = self._traffic.intensity_at(max(0.0, seen.at_s - SLOPE_S))
        # A jump is not a slope: it does not predict the future.
        slope = (rate - before) / SLOPE_S if before > 0 and rate < 1.5 * before else 0.0
        ahead = max(rate, rate + slope * self._cold_start_s)
        needed = self._capacity.needed(ahead)
        waiting = seen.num_held + sum(pod.load.num_requests_waiting for pod in seen.pods)
        self._extra = max(self._extra, self._worth(rate, needed, waiting, seen.ready)) if waiting else 0
        needed = max(needed, seen.concurrency > 0)
        return min(self._most, needed + self._extra)

    def _worth(self, rate: float, needed: int, waiting: int, ready: int) -> int:
        """Return the replicas beyond the needed ones that minimize their cost plus that of requests that wait too
        long.
        """
        each = self._capacity.held(1)
        left = waiting + (rate - self._capacity.held(ready)) * self._cold_start_s
        if left <= 0 or each <= 0 or rate <= 0:
            return 0
        slack = max(0.0, self._capacity.held(needed) - rate)
        price = needed / rate * PRICE

        def cost(extra: int) -> float:
            """Return the cost in pod-seconds."""
            drained_per_s = slack + extra * each
            drain_s = left / drained_per_s if drained_per_s else math.inf
            return price * rate * min(drain_s, 3600.0) + extra * (self._cold_start_s + min(drain_s, 3600.0))

        return min(range(self._most - needed + 1), key=cost)
