"""What a perfect policy without foresight could do: it knows how traffic is drawn now, and learns of a change at once.

It knows the rate behind the arrivals and its slope, not the arrivals that are drawn of it; what its replicas hold
(`capacity`); what waits; and what a start takes. It orders what the rate will need when a replica is ready, and more
while what waits is worth more than they cost. It removes what the rate no longer needs at once. Neighbour:
`clairvoyant`, which knows every request.
"""

from __future__ import annotations

import math

from pagemill_simulator.bounds.capacity import SteadyCapacity
from pagemill_simulator.bounds.schedule import GRID_S
from pagemill_simulator.scaling.policy import Seen
from pagemill_simulator.workloads.generator import Generator

PRICE = 3.0
"""What it pays for a request within the SLO, in what a request costs where replicas are used in full."""
SLOPE_S = 10.0
"""Over which the slope of the rate is taken, behind the present."""


class Informed:
    """Implements `scaling.policy.FleetScaler`, for one run."""

    name = "informed"
    interval_s = GRID_S
    wakes_at_once = True

    def __init__(self, traffic: Generator, capacity: SteadyCapacity, cold_start_s: float, most_replicas: int) -> None:
        self._traffic = traffic
        self._capacity = capacity
        self._cold_start_s = cold_start_s
        self._most = most_replicas
        self._extra = 0
        """Ordered for what waits."""

    def decide(self, seen: Seen) -> int:
        rate = self._traffic.intensity_at(seen.at_s)
        before = self._traffic.intensity_at(max(0.0, seen.at_s - SLOPE_S))
        # A jump is no slope: what it will do next is not known.
        slope = (rate - before) / SLOPE_S if before > 0 and rate < 1.5 * before else 0.0
        ahead = max(rate, rate + slope * self._cold_start_s)
        needed = self._capacity.needed(ahead)
        waiting = seen.concurrency - sum(pod.num_running for pod in seen.pods) - seen.num_on_leaving
        self._extra = max(self._extra, self._worth(rate, needed, waiting, seen.ready)) if waiting else 0
        needed = max(needed, seen.concurrency > 0)
        return min(self._most, needed + self._extra)

    def _worth(self, rate: float, needed: int, waiting: int, ready: int) -> int:
        """Replicas beyond those needed, by what they cost and how many requests wait too long without them."""
        each = self._capacity.held(1)
        left = waiting + (rate - self._capacity.held(ready)) * self._cold_start_s
        if left <= 0 or each <= 0 or rate <= 0:
            return 0
        slack = max(0.0, self._capacity.held(needed) - rate)
        price = needed / rate * PRICE

        def cost(extra: int) -> float:
            """In pod-seconds."""
            drained_per_s = slack + extra * each
            drain_s = left / drained_per_s if drained_per_s else math.inf
            return price * rate * min(drain_s, 3600.0) + extra * (self._cold_start_s + min(drain_s, 3600.0))

        return min(range(self._most - needed + 1), key=cost)
