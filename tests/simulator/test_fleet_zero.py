"""A simulated fleet scales to zero and back many times: no request is lost, refused, or left waiting at zero."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from pagemill_engine.config import EngineConfig
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_protocol.report.state import StepTimeParams
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.outcome import FleetOutcome
from pagemill_simulator.fleet.settings import ColdStart, FleetSettings
from pagemill_simulator.scaling.policy import ReplicaBounds
from pagemill_simulator.scaling.simulated import INTERVAL_S, own
from pagemill_simulator.workloads.request import SimRequest, Workload

pytestmark = pytest.mark.slow

IDLE_S = 2.0
NUM_VISITS = 60
DRAIN_S = 10.0
ENGINE = EngineConfig(
    model="sim",
    num_kv_blocks=512,
    max_model_len=1024,
    max_num_seqs=8,
    step_time=StepTimeParams(knots_tokens=[1, 512], knot_ms=[10.0, 100.0]),
)
COLD_START = ColdStart(schedule_s=0.2, pull_s=0.5, load_s=2.0, warm_s=0.3, spread=0.0)


def visits(seed: int, longest_gap_s: float) -> Workload:
    """Generate groups of requests with gaps shorter than, equal to, or longer than scaling to zero takes."""
    source, at_s, requests = random.Random(seed), 0.0, []
    for _ in range(NUM_VISITS):
        at_s += source.uniform(0.5, longest_gap_s)
        requests += [SimRequest(at_s, source.randint(1, 200), source.randint(1, 20))] * source.choice((1, 1, 3))
    return Workload(name="visits", source="test", requests=requests, duration_s=at_s + 30.0)


def serve(seed: int, longest_gap_s: float, *, crash_mean_s: float = 0.0) -> FleetOutcome:
    settings = FleetSettings(
        engine=ENGINE,
        bounds=ReplicaBounds(0, 1),
        cold_start=COLD_START,
        drain_timeout_s=DRAIN_S,
        crash_mean_s=crash_mean_s,
        seed=seed,
    )
    policy = own(ScalingSettings("Active", 0, 1, idle_s=IDLE_S))
    return simulate_fleet(visits(seed, longest_gap_s), settings, policy)


def num_wakes(outcome: FleetOutcome) -> int:
    return sum(not before.wanted and after.wanted for before, after in pairwise(outcome.timeline))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("longest_gap_s", [8.0, 24.0])
def test_requests_while_the_last_replica_stops_or_is_gone_are_answered_after_one_start(
    seed: int, longest_gap_s: float
) -> None:
    outcome = serve(seed, longest_gap_s)
    assert Counter(each.ending for each in outcome.requests) == {"served": len(outcome.requests)}
    assert num_wakes(outcome) >= NUM_VISITS // 5
    assert outcome.num_scale_ups == num_wakes(outcome) == outcome.num_scale_downs
    # One start, which is ordered at once, and the other requests of the group.
    longest_ms = max(each.ttft_ms or 0.0 for each in outcome.requests)
    assert longest_ms < 1000 * COLD_START.total_s + 500


def test_requests_during_a_crash_of_the_last_replica_are_answered() -> None:
    outcome = serve(7, 16.0, crash_mean_s=20.0)
    assert Counter(each.ending for each in outcome.requests) == {"served": len(outcome.requests)}
    assert min(point.ready for point in outcome.timeline if point.wanted) == 0


def test_after_the_last_group_the_fleet_stays_at_zero() -> None:
    outcome = serve(1, 12.0)
    last = outcome.timeline[-1]
    assert (last.wanted, last.starting, last.ready, last.draining) == (0, 0, 0, 0)
    last_arrival_s = outcome.requests[-1].arrival_s
    at_zero_s = next(point.at_s for point in outcome.timeline if point.at_s > last_arrival_s and not point.wanted)
    assert at_zero_s < last_arrival_s + COLD_START.total_s + 2.0 + IDLE_S + 2 * INTERVAL_S
