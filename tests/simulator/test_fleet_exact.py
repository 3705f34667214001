"""The exact fleet: every request ends once, no servable request is lost, and the seed determines the outcome."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill_engine.config import EngineConfig
from pagemill_operator.autoscaler.settings import Direction, ScalingSettings, Slo
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.resource.served import QueueLimits
from pagemill_simulator.engine import EngineSimulation
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.outcome import FleetOutcome
from pagemill_simulator.fleet.settings import ColdStart, FleetSettings
from pagemill_simulator.scaling import simulated
from pagemill_simulator.scaling.fixed import FixedReplicas
from pagemill_simulator.scaling.policy import FleetSnapshot, ReplicaBounds
from pagemill_simulator.scaling.simulated import SimulatedPolicy, rival
from pagemill_simulator.workloads.request import SimRequest, Workload

STEP_TIME = StepTimeParams(knots_tokens=[1, 64, 512], knot_ms=[6.0, 8.0, 22.0], decode_context_ms=1e-5)
ENGINE = EngineConfig(
    model="sim", num_kv_blocks=600, max_model_len=4096, max_num_seqs=16, max_num_waiting=64, step_time=STEP_TIME
)
COLD_START = ColdStart(schedule_s=0.5, pull_s=1.0, load_s=4.0, warm_s=0.5)
NETWORK_MS = 2.0
"""Milliseconds of a round trip."""


class Reported:
    """A policy that returns the test's numbers and records the signals."""

    name = "reported"

    def __init__(
        self, answer: Callable[[FleetSnapshot], int], *, interval_s: float = 1.0, wakes_at_once: bool = True
    ) -> None:
        self._answer = answer
        self.interval_s, self.wakes_at_once = interval_s, wakes_at_once
        self.seen: list[FleetSnapshot] = []

    def decide(self, seen: FleetSnapshot) -> int:
        self.seen.append(seen)
        return self._answer(seen)


def workload(requests: Sequence[SimRequest], duration_s: float = 0.0) -> Workload:
    return Workload(
        name="test", source="test", requests=requests, duration_s=max([duration_s, *(r.arrival_s for r in requests)])
    )


def traffic(count: int, rate: float, seed: int = 1, *, most_prompt: int = 600, most_output: int = 80) -> Workload:
    draw, at_s, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += draw.expovariate(rate)
        requests.append(SimRequest(at_s, draw.randint(1, most_prompt), draw.randint(1, most_output)))
    return workload(requests)


def fleet(low: int = 1, high: int = 4, **changes: object) -> FleetSettings:
    return FleetSettings(engine=ENGINE, **{"bounds": ReplicaBounds(low, high), "cold_start": COLD_START, **changes})


def own(settings: FleetSettings) -> SimulatedPolicy:
    low, high = settings.bounds
    slo, down = Slo(ttft_ms=500, tpot_ms=50), Direction(window_s=10.0)
    return simulated.own(ScalingSettings("Active", low, high, slo=slo, idle_s=20.0, down=down))


def endings(outcome: FleetOutcome) -> Counter[str]:
    return Counter(each.ending for each in outcome.requests)


def timeless(outcome: FleetOutcome) -> FleetOutcome:
    return msgspec.structs.replace(outcome, wall_s=0.0)


def test_an_idle_pod_answers_like_a_single_engine() -> None:
    requests = [SimRequest(10.0 * number + 1.0, 50 + 40 * number, 5 + number) for number in range(8)]
    outcome = simulate_fleet(workload(requests), fleet(1, 1), rival(FixedReplicas(), ReplicaBounds(1, 1)))
    alone = EngineSimulation(requests, ENGINE)
    alone.run()
    assert endings(outcome) == {"served": 8}
    for mine, theirs in zip(outcome.requests, alone.latencies, strict=True):
        assert mine.ttft_ms == pytest.approx(theirs.ttft_ms + NETWORK_MS)
        assert mine.tpot_ms == pytest.approx(theirs.tpot_ms)


def test_answers_have_the_lengths_of_the_workload() -> None:
    load = traffic(60, 8.0)
    outcome = simulate_fleet(load, fleet(2, 2), rival(FixedReplicas(), ReplicaBounds(2, 2)))
    assert [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in outcome.requests] == [
        each[:3] for each in load.requests
    ]
    assert outcome.pod_seconds == pytest.approx(2 * outcome.duration_s)
    assert outcome.is_exact


@pytest.mark.slow
def test_equal_seeds_give_equal_outcomes_in_any_process() -> None:
    settings = fleet(0, 3, crash_mean_s=20.0, seed=5)
    load = traffic(60, 5.0)
    first, second = (timeless(simulate_fleet(load, settings, own(settings))) for _ in range(2))
    assert first == second
    other = timeless(simulate_fleet(load, fleet(0, 3, crash_mean_s=20.0, seed=6), own(settings)))
    assert other != first
    code = f"import importlib.util as u; s = u.spec_from_file_location('t', {__file__!r}); m = u.module_from_spec(s); "
    code += "import sys; sys.modules['t'] = m; s.loader.exec_module(m); m.write_outcome()"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    reported = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(reported.stdout) == json.loads(msgspec.json.encode(first))


def write_outcome() -> None:
    """Write the outcome of the workload to stdout; another process calls this function."""
    settings = fleet(0, 3, crash_mean_s=20.0, seed=5)
    sys.stdout.buffer.write(msgspec.json.encode(timeless(simulate_fleet(traffic(60, 5.0), settings, own(settings)))))


def test_requests_wait_for_the_first_pod_which_is_started_at_once() -> None:
    load = workload([SimRequest(3.3, 100, 10), SimRequest(3.4, 100, 10)], 30.0)
    outcome = simulate_fleet(load, fleet(0, 2), Reported(lambda seen: 1, interval_s=1000.0))
    assert endings(outcome) == {"served": 2}
    start = COLD_START.draw(0, 0)
    assert outcome.requests[0].ttft_ms == pytest.approx(sum(start) * 1000, abs=50.0)
    slow = Reported(lambda seen: 1, interval_s=10.0, wakes_at_once=False)
    later = simulate_fleet(load, fleet(0, 2), slow)
    assert later.requests[0].ttft_ms == pytest.approx(sum(start) * 1000 + 6700, abs=50.0)


def test_a_request_that_waits_too_long_or_finds_a_full_queue_is_refused() -> None:
    impatient = QueueLimits(max_requests=3, max_bytes=10**9, timeout_s=2.0)
    load = workload([SimRequest(0.5, 100, 10)] * 5, 20.0)
    outcome = simulate_fleet(load, fleet(0, 1, queue=impatient), Reported(lambda seen: 0))
    assert endings(outcome) == {"refused": 5}
    assert all(each.ttft_ms is None and each.num_output_tokens == 0 for each in outcome.requests)


def test_a_prompt_that_no_engine_accepts_is_refused() -> None:
    load = workload([SimRequest(0.1, 5000, 10), SimRequest(0.2, 10, 5000)])
    outcome = simulate_fleet(load, fleet(), rival(FixedReplicas(), ReplicaBounds(1, 1)))
    assert [each.ending for each in outcome.requests] == ["refused", "served"]
    assert outcome.requests[1].num_output_tokens == 4096 - 10


def test_a_removed_pod_finishes_its_requests() -> None:
    load = workload([SimRequest(0.1, 50, 300)] * 8, 30.0)
    outcome = simulate_fleet(load, fleet(1, 2, start_replicas=2), Reported(lambda seen: 1))
    alone = simulate_fleet(load, fleet(2, 2), rival(FixedReplicas(), ReplicaBounds(2, 2)))
    assert endings(outcome) == {"served": 8}
    assert outcome.requests == alone.requests
    assert outcome.num_scale_downs == 1
    assert max(point.draining for point in outcome.timeline) == 1
    assert outcome.pod_seconds < 40.0


def test_a_request_that_outlasts_the_drain_continues_on_another_pod() -> None:
    load = workload([SimRequest(0.1, 50, 1000)] * 8, 30.0)
    settings = fleet(1, 2, start_replicas=2, drain_timeout_s=2.0)
    outcome = simulate_fleet(load, settings, Reported(lambda seen: 1))
    assert endings(outcome) == {"served": 8}
    assert {each.num_output_tokens for each in outcome.requests} == {1000}
    gone_s = next(point.at_s for point in outcome.timeline if point.ready == 1 and not point.draining)
    assert gone_s == pytest.approx(3.0)


@pytest.mark.slow
def test_crashes_lose_no_request_while_attempts_remain() -> None:
    load = traffic(150, 6.0, most_output=200)
    calm = simulate_fleet(load, fleet(3, 3), rival(FixedReplicas(), ReplicaBounds(3, 3)))
    rough = simulate_fleet(load, fleet(3, 3, crash_mean_s=15.0, seed=2), rival(FixedReplicas(), ReplicaBounds(3, 3)))
    assert min(point.ready for point in rough.timeline) < 3
    assert endings(rough) == endings(calm) == {"served": 150}
    assert [each.num_output_tokens for each in rough.requests] == [each.num_output_tokens for each in calm.requests]
    assert max(each.tpot_ms or 0 for each in rough.requests) > max(each.tpot_ms or 0 for each in calm.requests)


def test_turns_of_a_session_share_their_prefix_and_wait_for_each_other() -> None:
    turns = [SimRequest(0.5 + number * 0.001, 1000 + 150 * number, 100, session=1) for number in range(3)]
    strangers = [each._replace(session=None) for each in turns]
    together = simulate_fleet(workload(turns), fleet(1, 1), rival(FixedReplicas(), ReplicaBounds(1, 1))).requests
    apart = simulate_fleet(workload(strangers), fleet(1, 1), rival(FixedReplicas(), ReplicaBounds(1, 1))).requests
    assert [each.num_prompt_tokens for each in together] == [1000, 1150, 1300]
    for before, after in itertools.pairwise(together):
        ended_s = before.arrival_s + (before.ttft_ms + before.tpot_ms * 99) / 1000
        assert after.arrival_s >= ended_s - 1e-9
        assert after.ttft_ms < 0.5 * together[0].ttft_ms
    assert all(each.arrival_s < 0.6 for each in apart)


def test_a_policy_gets_the_state_of_the_fleet() -> None:
    policy = Reported(lambda seen: 2 if seen.at_s < 15 else 1)
    load = traffic(120, 6.0)
    outcome = simulate_fleet(load, fleet(1, 4), policy)
    last = policy.seen[-1]
    assert last.num_arrived <= 120
    assert last.num_prompt_tokens_arrived == sum(r.num_prompt_tokens for r in load.requests[: last.num_arrived])
    assert 0 < last.num_output_tokens_made <= sum(each.num_output_tokens for each in outcome.requests)
    starting = next(seen for seen in policy.seen if seen.at_s >= 3)
    assert (starting.wanted, starting.ready, len(starting.pods)) == (2, 1, 2)
    assert starting.signals.fleet.starting == 1
    learned = next(seen.signals.fleet.cold_start_s for seen in policy.seen if seen.at_s >= 14)
    assert learned == pytest.approx(sum(COLD_START.draw(0, 1)), abs=1.0)
    for seen in policy.seen:
        signals = seen.signals
        assert signals.is_complete
        assert signals.at_s == seen.at_s
        assert (signals.fleet.ready, signals.fleet.wanted) == (seen.ready, seen.wanted)
        assert 0 <= seen.concurrency <= 120
    busy = [seen for seen in policy.seen if seen.signals.engines.truth == "value" and seen.signals.lengths.prompt.total]
    assert busy
    assert busy[-1].signals.arrivals.requests_per_s == pytest.approx(6.0, rel=0.5)
    assert busy[-1].signals.engines.step_time.num_steps_observed > 0


def test_numbers_outside_the_bounds_are_corrected() -> None:
    policy = Reported(lambda seen: 100 if seen.at_s < 10 else -3)
    outcome = simulate_fleet(workload([SimRequest(0.1, 10, 5)], 40.0), fleet(1, 3), policy)
    assert {point.wanted for point in outcome.timeline} == {1, 3}


def test_the_default_policy_follows_a_ramp_and_scales_to_zero_without_losing_a_request() -> None:
    quiet, busy = traffic(10, 1.0).requests, traffic(400, 14.0, seed=2).requests
    begin_s = quiet[-1].arrival_s
    load = workload([*quiet, *(each._replace(arrival_s=each.arrival_s + begin_s) for each in busy)], 200.0)
    settings = fleet(0, 4)
    policy = own(settings)
    outcome = simulate_fleet(load, settings, policy)
    assert endings(outcome) == {"served": 410}
    assert max(point.ready for point in outcome.timeline) >= 2
    assert outcome.timeline[-1].wanted <= 1
    assert policy.changes[0][1].reason == "Woken"
    assert len(policy.changes) == outcome.num_scale_ups + outcome.num_scale_downs


def test_progress_rises_from_zero_to_one() -> None:
    shares: list[float] = []
    simulate_fleet(traffic(20, 5.0), fleet(), rival(FixedReplicas(), ReplicaBounds(1, 1)), progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 50


def test_a_workload_without_requests_costs_its_pods() -> None:
    outcome = simulate_fleet(workload([], 60.0), fleet(2, 2), rival(FixedReplicas(), ReplicaBounds(2, 2)))
    assert outcome.requests == []
    assert outcome.pod_seconds == pytest.approx(120.0)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    answers=st.lists(st.integers(-1, 5), min_size=1, max_size=8),
    crash_mean_s=st.sampled_from([0.0, 3.0, 30.0]),
    low=st.integers(0, 1),
    sessions=st.booleans(),
)
def test_every_request_ends_once_whatever_happens(
    seed: int, answers: list[int], crash_mean_s: float, low: int, sessions: bool
) -> None:
    draw = random.Random(seed)
    load = traffic(40, 10.0, seed, most_output=150)
    if sessions:
        load = workload([each._replace(session=draw.randrange(6)) for each in load.requests])
    turns = itertools.cycle(answers)
    policy = Reported(lambda seen: next(turns), interval_s=draw.choice([0.7, 2.0]), wakes_at_once=draw.random() < 0.5)
    settings = fleet(low, 4, crash_mean_s=crash_mean_s, seed=seed, drain_timeout_s=draw.choice([0.0, 0.5, 10.0]))
    outcome = simulate_fleet(load, settings, policy)
    assert len(outcome.requests) == 40
    for each in outcome.requests:
        assert each.num_output_tokens > 0 or each.ending != "served"
        assert each.ttft_ms is None or each.ttft_ms >= NETWORK_MS
    assert all(low <= point.wanted <= 4 for point in outcome.timeline)
    times = [point.at_s for point in outcome.timeline]
    assert times == sorted(times)
    assert outcome.pod_seconds >= 0
    if low and not crash_mean_s:
        assert endings(outcome)["lost"] == 0
