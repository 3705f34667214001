"""Collects what happens to requests and pods while a fleet is simulated, and builds the outcome."""

from __future__ import annotations

import time
from itertools import pairwise

from pagemill_simulator.fleet.outcome import FleetOutcome, FleetPoint, Served
from pagemill_simulator.workloads.request import Workload

FLAP_S = 300.0
"""Seconds within which a reversed change counts as a flap."""


class EventLog:
    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._served: list[Served | None] = [None] * len(workload.requests)
        self._timeline: list[FleetPoint] = []
        self._changes: list[tuple[float, int]] = []
        self.pod_seconds = 0.0
        self._began_s = time.perf_counter()
        self.num_open = len(workload.requests)
        """Number of requests that have not ended, including those still to arrive."""
        self.num_crashes = 0
        self._num_lines = self._num_line_tokens = 0

    def ended(self, index: int, served: Served) -> None:
        """Record the end of the workload's `index`-th request. Raise `RuntimeError` if it had ended before."""
        if self._served[index] is not None:
            raise RuntimeError(f"request {index} ended twice: {self._served[index]}, then {served}")
        self._served[index] = served
        self.num_open -= 1

    def line_ended(self, served: Served) -> None:
        """Record the end of a batch line."""
        if served.ending == "served":
            self._num_lines += 1
            self._num_line_tokens += served.num_output_tokens

    def changed(self, at_s: float, before: int, after: int) -> None:
        """Record a change of the wanted replicas."""
        self._changes.append((at_s, after - before))

    def note(self, point: FleetPoint) -> None:
        """Add a point of the timeline; the latest of one instant counts."""
        if self._timeline and self._timeline[-1].at_s == point.at_s:
            self._timeline.pop()
        self._timeline.append(point)

    def paid(self, pod_seconds: float) -> None:
        self.pod_seconds += pod_seconds

    def crashed(self) -> None:
        self.num_crashes += 1

    def outcome(self, policy: str, duration_s: float, *, is_exact: bool, num_adapter_loads: int = 0) -> FleetOutcome:
        """Return the outcome. Raise `RuntimeError` if a request never ended."""
        served = [each for each in self._served if each is not None]
        if len(served) != len(self._served):
            raise RuntimeError(f"{len(self._served) - len(served)} requests never ended")
        return FleetOutcome(
            policy=policy,
            workload=self._workload.name,
            requests=sorted(served, key=lambda each: each.arrival_s),
            timeline=self._timeline,
            pod_seconds=self.pod_seconds,
            duration_s=duration_s,
            wall_s=time.perf_counter() - self._began_s,
            num_scale_ups=sum(delta > 0 for _, delta in self._changes),
            num_scale_downs=sum(delta < 0 for _, delta in self._changes),
            num_flaps=count_flaps(self._changes),
            is_exact=is_exact,
            num_lines=self._num_lines,
            num_line_tokens=self._num_line_tokens,
            num_adapter_loads=num_adapter_loads,
        )


def count_flaps(changes: list[tuple[float, int]]) -> int:
    """Return how many changes (time, difference of replicas) the next one reversed too soon."""
    return sum(delta * then < 0 and later_s - at_s <= FLAP_S for (at_s, delta), (later_s, then) in pairwise(changes))
