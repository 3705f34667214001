"""The bounds of scaling: no policy is better than the search, and no learning policy than one with foresight."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill_engine.config import EngineConfig
from pagemill_operator.autoscaler.settings import ScalingSettings, Slo
from pagemill_protocol.report.state import StepTimeParams
from pagemill_simulator.bounds.capacity import SHARE, SteadyCapacity
from pagemill_simulator.bounds.clairvoyant import TOLERANCE, cheapest_schedule, search
from pagemill_simulator.bounds.informed import Informed
from pagemill_simulator.bounds.schedule import GRID_S, Order, Schedule
from pagemill_simulator.bounds.schedule_cost import least_pod_seconds
from pagemill_simulator.bounds.trials import Trials, share
from pagemill_simulator.fleet.figures import figures_of
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.settings import ColdStart, FleetSettings
from pagemill_simulator.scaling.policy import ReplicaBounds
from pagemill_simulator.scaling.rivals import make_rival
from pagemill_simulator.scaling.simulated import own, rival
from pagemill_simulator.workloads.agentic import Agentic
from pagemill_simulator.workloads.batches import BesideBatch
from pagemill_simulator.workloads.clusters import Clusters
from pagemill_simulator.workloads.generator import Generator
from pagemill_simulator.workloads.patterns import FlashCrowd, Retrieval, SilentNights
from pagemill_simulator.workloads.shapes import Burst, Ramp, Steady, Step

pytestmark = pytest.mark.slow

STEP_TIME = StepTimeParams(
    knots_tokens=[1, 64, 512, 2048], knot_ms=[24.0, 30.0, 90.0, 330.0], decode_context_ms=2e-5, chunk_context_ms=4e-7
)
ENGINE = EngineConfig(model="sim", num_kv_blocks=4096, max_model_len=16384, max_num_seqs=64, step_time=STEP_TIME)
SLO = Slo(ttft_ms=2000.0, tpot_ms=100.0)
COLD_START = ColdStart(schedule_s=1.0, pull_s=2.0, load_s=12.0, warm_s=5.0)
BOUNDS = ReplicaBounds(1, 3)
LENGTHS = {"prompt_tokens": 1000.0, "prompt_sigma": 0.8, "output_tokens": 60.0, "output_sigma": 0.6}
KINDS: dict[str, Generator] = {
    "ramp": Ramp(from_rate=1, to_rate=6, before_s=30, over_s=60, after_s=60, **LENGTHS),
    "burst": Burst(rate=1, factor=8, at_s=50, for_s=40, duration_s=150, **LENGTHS),
    "flash crowd": FlashCrowd(rate=1, factor=8, at_s=40, rises_s=10, halves_s=30, duration_s=150, **LENGTHS),
    "clusters": Clusters(rate=1, cluster_requests=12, duration_s=150),
    "silent nights": SilentNights(high_rate=4, days=2, compress=1152, **LENGTHS),
    "retrieval": Retrieval(rate=0.6, duration_s=150),
    "agents": Agentic(sessions_per_s=0.1, duration_s=150, turns=2, calls=4, first_prompt_tokens=1500),
    "beside a batch": BesideBatch(rate=3, period_s=80, duration_s=150, num_lines=150, submitted_s=20, **LENGTHS),
}
LIGHT: dict[str, Generator] = {
    "steady": Steady(rate=1.5, duration_s=240, **LENGTHS),
    "ramp": Ramp(from_rate=0.3, to_rate=1.5, before_s=60, over_s=60, after_s=120, **LENGTHS),
    "burst": Burst(rate=0.3, factor=5, at_s=100, for_s=60, duration_s=240, **LENGTHS),
    "flash crowd": FlashCrowd(rate=0.3, factor=5, at_s=80, rises_s=10, halves_s=60, duration_s=240, **LENGTHS),
    "retrieval": Retrieval(rate=0.12, duration_s=400),
    "beside a batch": BesideBatch(rate=1, period_s=80, duration_s=240, num_lines=150, submitted_s=20, **LENGTHS),
}
"""Workloads for which one replica suffices."""


def fleet(low: int = 1) -> FleetSettings:
    return FleetSettings(engine=ENGINE, bounds=ReplicaBounds(low, 3), cold_start=COLD_START, seed=3, start_replicas=1)


@pytest.mark.sample("clusters")
@pytest.mark.parametrize("kind", list(KINDS))
def test_no_policy_beats_the_search_by_more_than_one_percent_at_equal_or_lower_cost(kind: str) -> None:
    workload, settings = KINDS[kind].workload(5), fleet(low=0 if kind == "silent nights" else 1)
    policies = [
        own(ScalingSettings("Active", *settings.bounds, slo=SLO)),
        *(rival(make_rival(name, {}), settings.bounds) for name in ("wva", "hpa")),
        rival(make_rival("knative", {"target_concurrency": "6"}), settings.bounds),
    ]
    outcomes = [simulate_fleet(workload, settings, policy, fast=True) for policy in policies]
    figures = [figures_of(each, slo_ttft_ms=SLO.ttft_ms, slo_tpot_ms=SLO.tpot_ms) for each in outcomes]
    alone = Trials("clairvoyant", workload, settings, SLO)
    best = search(alone, num_changes=8)
    assert share(best.missed, workload.requests) >= alone.best_share() - TOLERANCE - 1e-9
    assert max(each.slo_attained or 0.0 for each in figures) <= alone.best_share() + 0.01
    beside_them = Trials("clairvoyant", workload, settings, SLO)
    search(beside_them, others=outcomes, num_changes=0)
    for each in figures:
        assert (each.slo_attained or 0.0) <= beside_them.best_share(each.pod_seconds), each.policy


@pytest.mark.sample("retrieval")
@pytest.mark.parametrize("kind", list(LIGHT))
def test_with_one_sufficient_replica_our_policy_costs_little_more_than_one_that_knows_the_rate(kind: str) -> None:
    traffic, settings = LIGHT[kind], fleet()
    workload = traffic.workload(4)
    capacity = SteadyCapacity(traffic, settings, SLO, guess=0.2 if kind == "retrieval" else 4.0, duration_s=100.0)
    informed = Informed(traffic, capacity, COLD_START.total_s, BOUNDS.max_replicas)
    bound, found = (
        figures_of(
            simulate_fleet(workload, settings, policy, fast=True), slo_ttft_ms=SLO.ttft_ms, slo_tpot_ms=SLO.tpot_ms
        )
        for policy in (informed, own(ScalingSettings("Active", *BOUNDS, slo=SLO)))
    )
    assert bound.slo_attained is not None
    assert found.slo_attained is not None
    assert bound.slo_attained >= SLO.share, "the case must not be trivial"
    assert found.slo_attained >= bound.slo_attained - 0.005
    assert found.pod_seconds <= 1.15 * bound.pod_seconds
    assert (found.num_flaps, found.num_refused) == (0, 0)


def test_a_policy_that_learns_of_a_change_when_it_happens_acts_then_and_not_before() -> None:
    traffic = Step(from_rate=1, to_rate=5, at_s=60, duration_s=150, **LENGTHS)
    capacity = SteadyCapacity(traffic, fleet(), SLO, guess=4.0, duration_s=60.0)
    informed = Informed(traffic, capacity, COLD_START.total_s, BOUNDS.max_replicas)
    outcome = simulate_fleet(traffic.workload(2), fleet(), informed, fast=True)
    first = next(point.at_s for point in outcome.timeline if point.wanted > 1)
    assert 60 <= first <= 60 + 2 * GRID_S
    assert max(point.wanted for point in outcome.timeline if point.at_s < 60) == 1


def test_the_computed_capacity_of_replicas_is_the_actual_one() -> None:
    traffic = Steady(rate=1, **LENGTHS)
    capacity = SteadyCapacity(traffic, fleet(), SLO, guess=4.0, duration_s=120.0)
    held = capacity.held(1)
    assert capacity.needed(0.9 * held) == 1
    assert capacity.needed(1.2 * held) == 2
    assert capacity.needed(0.0) == 1
    for factor, is_held in ((1.0, True), (1.4, False)):
        workload = traffic.steady(factor * held, 120.0).workload(0)
        trials = Trials("steady", workload, FleetSettings(engine=ENGINE, bounds=ReplicaBounds(1, 1)), SLO)
        assert (share(trials.try_out(Schedule.constant(1)).missed, workload.requests) >= SHARE) is is_held


class WholeTrials(Trials):
    def challenge(self, schedule: Schedule) -> None:
        self.try_out(schedule)


@pytest.mark.sample("burst")
@pytest.mark.parametrize("kind", ["burst", "silent nights"])
def test_ending_a_trial_early_changes_no_result(kind: str) -> None:
    workload, settings = KINDS[kind].workload(2), fleet(low=0 if kind == "silent nights" else 1)
    ended, whole = (each("clairvoyant", workload, settings, SLO) for each in (Trials, WholeTrials))
    best = [search(each, num_changes=4).schedule for each in (ended, whole)]
    assert best[0] == best[1]
    assert [each[:3] for each in ended.frontier] == [each[:3] for each in whole.frontier]
    for trial in whole.frontier:
        least = least_pod_seconds(trial.schedule, settings, workload.duration_s)
        assert 0.7 * trial.pod_seconds - 10 <= least <= trial.pod_seconds + 1e-6


courses = st.lists(st.lists(st.integers(0, 30), min_size=5, max_size=5), min_size=3, max_size=3)


@settings(deadline=None)
@given(courses, st.floats(0.0, 50.0))
def test_the_schedule_is_the_cheapest_of_all(missed: list[list[int]], price: float) -> None:
    numbers, window_s = dict(enumerate(missed, start=1)), 10.0
    loading = COLD_START.total_s - COLD_START.schedule_s

    def cost(course: tuple[int, ...]) -> float:
        kept = sum(price * numbers[number][place] + number * window_s for place, number in enumerate(course))
        return kept + loading * sum(max(0, after - before) for before, after in itertools.pairwise(course))

    found = cheapest_schedule(numbers, window_s, price, COLD_START)
    least = min(map(cost, itertools.product(numbers, repeat=5)))
    assert cost(tuple(found)) == pytest.approx(least)


def test_a_schedule_starts_replicas_ahead_and_keeps_those_needed_again_soon() -> None:
    schedule = Schedule.ready_at([1, 1, 3, 1, 3, 1, 1, 1, 1], window_s=20.0, ahead_s=20.0)
    assert schedule.orders == (Order(0.0, 1), Order(20.0, 3), Order(100.0, 1))
    assert [schedule.at(at_s) for at_s in (0.0, 18.0, 20.0, 99.0, 100.0, 1e6)] == [1, 1, 3, 3, 1, 1]
