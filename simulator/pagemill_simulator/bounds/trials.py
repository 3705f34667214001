"""Simulates schedules of replicas, and keeps those that no other beats in both requests within the SLO and cost.

One object is for one workload on one fleet. Every schedule is simulated once, and only until another one is known to
beat it: the least cost of a schedule follows from it alone (`schedule_cost`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pagemill_operator.autoscaler.settings import Slo
from pagemill_simulator.bounds.schedule import Schedule, ScheduledReplicas
from pagemill_simulator.bounds.schedule_cost import least_pod_seconds
from pagemill_simulator.fleet.figures import Figures, figures_of, is_within_slo
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.outcome import FleetOutcome, Served
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.workloads.request import Workload


class Trial(NamedTuple):
    schedule: Schedule
    missed: int
    """Requests that were not served within the SLO."""
    pod_seconds: float
    figures: Figures
    missed_arrivals_s: tuple[float, ...]


class _Enough(Exception):
    """Raised when more requests than allowed have missed the SLO."""


class Trials:
    def __init__(self, name: str, workload: Workload, settings: FleetSettings, slo: Slo) -> None:
        """`name` is the scaler's name in outcomes."""
        self._name = name
        self._slo = slo
        self._known: dict[Schedule, Trial] = {}
        self._beaten: set[Schedule] = set()
        """Schedules that were not simulated to their end."""
        self.workload = workload
        self.settings = settings
        self.frontier: list[Trial] = []
        """Trials that no other beats in both, by rising pod-seconds."""

    def try_out(self, schedule: Schedule) -> Trial:
        if schedule not in self._known:
            self.add(schedule, self.simulate(schedule))
        return self._known[schedule]

    def challenge(self, schedule: Schedule) -> None:
        """Try a schedule, but only until it is known that the frontier stays as it is."""
        if schedule in self._known or schedule in self._beaten:
            return
        cost = least_pod_seconds(schedule, self.settings, self.workload.duration_s)
        most = min((each.missed for each in self.frontier if each.pod_seconds <= cost), default=math.inf)
        if (outcome := self._unless_more_miss(schedule, most - 1)) is None:
            self._beaten.add(schedule)
        else:
            self.add(schedule, outcome)

    def misses_at_most(self, schedule: Schedule, most: float) -> bool:
        """Whether at most `most` requests miss the SLO."""
        return self._unless_more_miss(schedule, most) is not None

    def simulate(self, schedule: Schedule) -> FleetOutcome:
        return simulate_fleet(self.workload, self.settings, ScheduledReplicas(self._name, schedule), fast=True)

    def _unless_more_miss(self, schedule: Schedule, most: float) -> FleetOutcome | None:
        """Return the outcome, or None as soon as more than `most` requests miss the SLO."""
        if most < 0:
            return None
        missed = 0

        def on_end(served: Served) -> None:
            nonlocal missed
            missed += self.missed(served)
            if missed > most:
                raise _Enough

        scaler = ScheduledReplicas(self._name, schedule)
        try:
            return simulate_fleet(self.workload, self.settings, scaler, fast=True, on_end=on_end)
        except _Enough:
            return None

    def add(self, schedule: Schedule, outcome: FleetOutcome) -> None:
        """Add an outcome to the known trials and the frontier."""
        arrivals_s = tuple(served.arrival_s for served in outcome.requests if self.missed(served))
        figures = figures_of(outcome, slo_ttft_ms=self._slo.ttft_ms, slo_tpot_ms=self._slo.tpot_ms)
        missed = len(arrivals_s)
        trial = self._known[schedule] = Trial(schedule, missed, outcome.pod_seconds, figures, arrivals_s)
        if not any(each.missed <= missed and each.pod_seconds <= trial.pod_seconds for each in self.frontier):
            kept = [each for each in self.frontier if each.missed < missed or each.pod_seconds < trial.pod_seconds]
            self.frontier = sorted([*kept, trial], key=lambda each: each.pod_seconds)

    def missed(self, served: Served) -> bool:
        return not is_within_slo(served, self._slo.ttft_ms, self._slo.tpot_ms)

    def best_share(self, pod_seconds: float = math.inf) -> float:
        """Return the highest share within the SLO that was reached at no more than this cost."""
        reached = [each.missed for each in self.frontier if each.pod_seconds <= pod_seconds]
        return share(min(reached), self.workload.requests) if reached else 0.0

    def cheapest(self, least_share: float) -> Trial:
        """Return the cheapest trial with at least this share, or else with the highest."""
        aim = min(least_share, self.best_share())
        return next(each for each in self.frontier if share(each.missed, self.workload.requests) >= aim)


def share(missed: int, requests: Sequence[object]) -> float:
    """Return the share of requests within the SLO."""
    return 1.0 - missed / len(requests) if requests else 1.0
