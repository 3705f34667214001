"""The fleet in fast-forward is close to the exact one, ends every request once, and is reproducible."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_engine.config import EngineConfig
from pagemill_execution.config import SimulatedKinds
from pagemill_operator.autoscaler.settings import ScalingSettings, Slo
from pagemill_protocol.report.cache_kinds import CacheKind
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.resource.served import QueueLimits
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.outcome import FleetOutcome
from pagemill_simulator.fleet.settings import ColdStart, FleetSettings
from pagemill_simulator.scaling import simulated
from pagemill_simulator.scaling.fixed import FixedReplicas
from pagemill_simulator.scaling.policy import FleetScaler, FleetSnapshot, ReplicaBounds
from pagemill_simulator.scaling.simulated import SimulatedPolicy, rival
from pagemill_simulator.workloads.request import SimRequest, Workload
from pagemill_simulator.workloads.shapes import Steady

simulate_fleet_fast = partial(simulate_fleet, fast=True)
STEP_TIME = StepTimeParams(
    knots_tokens=[1, 64, 512], knot_ms=[6.0, 8.0, 22.0], decode_context_ms=1e-4, chunk_context_ms=1e-6
)
ENGINE = EngineConfig(model="sim", num_kv_blocks=4000, max_model_len=16384, step_time=STEP_TIME)
SEATED = msgspec.structs.replace(ENGINE, max_num_seqs=4)
SMALL = msgspec.structs.replace(ENGINE, num_kv_blocks=700, max_model_len=8000)


def windowed(*, shares_memory: bool) -> EngineConfig:
    """Return an engine that has too few blocks of a window for all that would run."""
    kinds = CacheKind(), CacheKind("window", 256)
    return msgspec.structs.replace(ENGINE, simulated_kinds=SimulatedKinds(kinds, (4000, 60), shares_memory))


WINDOWED = windowed(shares_memory=False)
SHARING = windowed(shares_memory=True)
COLD_START = ColdStart(schedule_s=0.5, pull_s=1.0, load_s=4.0, warm_s=0.5)
CLOSE = 0.03
"""The maximum relative error of fast-forward."""


def workload(requests: list[SimRequest], duration_s: float = 0.0) -> Workload:
    requests.sort()
    return Workload(name="test", source="test", requests=requests, duration_s=max(duration_s, requests[-1].arrival_s))


def traffic(count: int, rate: float, seed: int) -> Workload:
    """Generate requests with the lengths of Azure's conversations."""
    return workload(Steady(rate=rate, duration_s=3 * count / rate).requests(seed)[:count])


def sessions(count: int, rate: float, seed: int) -> Workload:
    draw, begin_s, requests = random.Random(seed), 0.0, []
    for session in range(count):
        begin_s += draw.expovariate(rate)
        arrival_s, said = begin_s, 0
        for _ in range(draw.randint(2, 4)):
            num_prompt_tokens, num_output_tokens = said + draw.randint(40, 500), draw.randint(5, 60)
            requests.append(SimRequest(arrival_s, num_prompt_tokens, num_output_tokens, session))
            said = num_prompt_tokens + num_output_tokens
            arrival_s += draw.uniform(0.2, 2.0)
    return workload(requests)


def fleet(low: int, high: int, **changes: object) -> FleetSettings:
    return FleetSettings(**{"engine": ENGINE, "bounds": ReplicaBounds(low, high), "cold_start": COLD_START, **changes})


def own() -> SimulatedPolicy:
    return simulated.own(ScalingSettings("Active", 0, 4, slo=Slo(ttft_ms=500, tpot_ms=50), idle_s=20.0))


class Reported:
    name, interval_s, wakes_at_once = "reported", 1.0, True

    def __init__(self, answer: Callable[[FleetSnapshot], int]) -> None:
        self._answer = answer
        self.seen: list[FleetSnapshot] = []

    def decide(self, seen: FleetSnapshot) -> int:
        self.seen.append(seen)
        return self._answer(seen)


def fixed(replicas: int) -> SimulatedPolicy:
    return rival(FixedReplicas(), ReplicaBounds(replicas, replicas))


def down() -> Reported:
    return Reported(lambda seen: 3 if seen.at_s < 4 else 1)


def endings(outcome: FleetOutcome) -> Counter[str]:
    return Counter(each.ending for each in outcome.requests)


def quantile(values: list[float | None], share: float) -> float:
    ordered = sorted(value for value in values if value is not None)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measures(outcomes: list[FleetOutcome]) -> dict[str, float]:
    found = {
        "pod seconds": sum(each.pod_seconds for each in outcomes),
        "duration": sum(each.duration_s for each in outcomes),
    }
    requests = [request for outcome in outcomes for request in outcome.requests]
    for name, values in (
        ("ttft", [each.ttft_ms for each in requests]),
        ("tpot", [each.tpot_ms for each in requests]),
    ):
        found |= {f"{name} p50": quantile(values, 0.5), f"{name} p95": quantile(values, 0.95)}
    return found


CASES: dict[str, tuple[list[Workload], FleetSettings, Callable[[], FleetScaler]]] = {
    "independent requests": ([traffic(120, 12.0, 2)], fleet(3, 3), partial(fixed, 3)),
    "sessions": ([sessions(50, 4.0, 1)], fleet(3, 3), partial(fixed, 3)),
    "sessions with windows": ([sessions(50, 4.0, 1)], fleet(3, 3, engine=WINDOWED), partial(fixed, 3)),
    "windows that take blocks of what is kept": (
        [sessions(50, 4.0, 1)],
        fleet(3, 3, engine=SHARING),
        partial(fixed, 3),
    ),
    "few seats": ([traffic(60, 12.0, 3)], fleet(2, 2, engine=SEATED), partial(fixed, 2)),
    "more than caches hold": (
        [traffic(80, 14.0, seed) for seed in range(4)],
        fleet(2, 2, engine=SMALL),
        partial(fixed, 2),
    ),
    "from zero by our own policy": ([traffic(100, 10.0, 3)], fleet(0, 4), own),
    "pods that drain": ([traffic(100, 12.0, 4)], fleet(1, 3, start_replicas=3), down),
    "pods that crash": ([traffic(80, 8.0, 5)], fleet(3, 3, crash_mean_s=12.0, seed=3), partial(fixed, 3)),
}


@pytest.mark.slow
@pytest.mark.sample("sessions", "more than caches hold", "from zero by our own policy", "pods that crash")
@pytest.mark.parametrize("case", CASES)
def test_fast_forward_is_close_to_exact(case: str) -> None:
    loads, fleet_settings, policy = CASES[case]
    exact = [simulate_fleet(load, fleet_settings, policy()) for load in loads]
    fast = [simulate_fleet_fast(load, fleet_settings, policy()) for load in loads]
    for mine, theirs in zip(fast, exact, strict=True):
        assert (mine.is_exact, theirs.is_exact) == (False, True)
        assert endings(mine) == endings(theirs)
        assert [each.num_output_tokens for each in mine.requests] == [e.num_output_tokens for e in theirs.requests]
        assert (mine.num_scale_ups, mine.num_scale_downs) == (theirs.num_scale_ups, theirs.num_scale_downs)
    assert measures(fast) == pytest.approx(measures(exact), rel=CLOSE)


def test_requests_wait_where_windows_have_few_blocks() -> None:
    """Else the cases above would not show whether windows count."""
    late = [
        measures([simulate_fleet_fast(sessions(50, 4.0, 1), fleet(3, 3, engine=engine), fixed(3))])["ttft p95"]
        for engine in (ENGINE, SHARING, WINDOWED)
    ]
    assert late[0] * 1.5 < late[1] < late[2] / 1.5


def test_requests_go_to_the_same_pods_as_in_the_exact_fleet() -> None:
    """Reports have the same age as in the exact fleet, so that routing errors because of it are the same."""
    load = traffic(120, 15.0, 6)
    exact, fast = (each(load, fleet(3, 3), fixed(3)) for each in (simulate_fleet, simulate_fleet_fast))
    pairs = zip(fast.requests, exact.requests, strict=True)
    same = sum((mine.ttft_ms or 0) == pytest.approx(theirs.ttft_ms, abs=0.01) for mine, theirs in pairs)
    assert same > 0.9 * len(load.requests)


def test_the_policy_sees_the_same_state_as_in_the_exact_fleet() -> None:
    load = traffic(100, 10.0, 7)
    policies = Reported(lambda seen: 2), Reported(lambda seen: 2)
    simulate_fleet(load, fleet(2, 2), policies[0])
    simulate_fleet_fast(load, fleet(2, 2), policies[1])
    assert len(policies[0].seen) == len(policies[1].seen)
    for theirs, mine in zip(policies[0].seen, policies[1].seen, strict=True):
        assert (mine.at_s, mine.wanted, mine.ready, mine.num_held) == (theirs.at_s, 2, 2, theirs.num_held)
        assert (mine.num_arrived, mine.num_prompt_tokens_arrived) == (
            theirs.num_arrived,
            theirs.num_prompt_tokens_arrived,
        )
        assert mine.concurrency == pytest.approx(theirs.concurrency, abs=2)
        assert mine.num_output_tokens_made == pytest.approx(theirs.num_output_tokens_made, abs=20)
        assert mine.signals.is_complete
        assert mine.signals.fleet == theirs.signals.fleet
        assert mine.signals.arrivals == theirs.signals.arrivals
        engines, other = mine.signals.engines, theirs.signals.engines
        assert (engines.truth, engines.num_kv_bytes_total, engines.max_num_seqs) == (
            other.truth,
            other.num_kv_bytes_total,
            other.max_num_seqs,
        )
        assert engines.num_kv_bytes_active == pytest.approx(other.num_kv_bytes_active, rel=0.1, abs=100)
    last = policies[1].seen[-1].signals
    assert last.lengths == policies[0].seen[-1].signals.lengths


@pytest.mark.slow_for("RoundRobin", "PowerOfTwo", "PrefixHash")
@pytest.mark.parametrize("name", ["LeastRequest", "RoundRobin", "PowerOfTwo", "PrefixHash", "Weighted322"])
def test_other_policies_route_like_in_the_exact_fleet(name: str) -> None:
    load = traffic(60, 8.0, 8)
    changes = {"routing_policy": name}
    exact, fast = (each(load, fleet(3, 3, **changes), fixed(3)) for each in (simulate_fleet, simulate_fleet_fast))
    assert endings(fast) == endings(exact) == {"served": 60}
    # Policies that draw random numbers draw others, so that other requests run together.
    close = CLOSE if name in ("LeastRequest", "RoundRobin") else 0.5
    assert measures([fast]) == pytest.approx(measures([exact]), rel=close)


def test_a_full_queue_and_a_long_wait_refuse_requests() -> None:
    queue = QueueLimits(max_requests=3, max_bytes=10**9, timeout_s=2.0)
    load = workload([SimRequest(0.5, 100, 10)] * 5, 20.0)
    outcome = simulate_fleet_fast(load, fleet(0, 1, queue=queue), Reported(lambda seen: 0))
    assert endings(outcome) == {"refused": 5}
    assert outcome.duration_s == 20.0


def test_equal_workloads_give_equal_outcomes() -> None:
    settings, load = fleet(0, 4, crash_mean_s=30.0, seed=4), sessions(40, 4.0, 9)
    first, second = (simulate_fleet_fast(load, settings, own()) for _ in range(2))
    assert msgspec.structs.replace(first, wall_s=0.0) == msgspec.structs.replace(second, wall_s=0.0)
    other = simulate_fleet_fast(load, fleet(0, 4, crash_mean_s=30.0, seed=5), own())
    assert other.requests != first.requests


@settings(max_examples=num_examples(40), deadline=None)
@given(
    drawn=st.lists(
        st.tuples(
            st.floats(0.0, 0.5), st.integers(0, 900), st.integers(0, 150), st.sampled_from([None, None, None, 0, 1, 2])
        ),
        min_size=1,
        max_size=30,
    ),
    orders=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    crash_mean_s=st.sampled_from([0.0, 6.0, 40.0]),
    drain_timeout_s=st.sampled_from([0.0, 1.0, 60.0]),
    num_blocks=st.sampled_from([80, 400]),
    seed=st.integers(0, 100),
)
def test_every_request_ends_once_whatever_happens_to_pods(
    drawn: list[tuple[float, int, int, int | None]],
    orders: list[int],
    crash_mean_s: float,
    drain_timeout_s: float,
    num_blocks: int,
    seed: int,
) -> None:
    now, requests = 0.0, []
    for gap_s, num_prompt_tokens, num_output_tokens, session in drawn:
        now += gap_s
        requests.append(SimRequest(now, num_prompt_tokens, num_output_tokens, session))
    load = Workload(name="drawn", source="drawn", requests=requests, duration_s=now + 5)
    engine = msgspec.structs.replace(ENGINE, num_kv_blocks=num_blocks, max_model_len=1200, max_num_seqs=8)
    fleet_settings = fleet(
        0, 4, engine=engine, start_replicas=1, crash_mean_s=crash_mean_s, drain_timeout_s=drain_timeout_s, seed=seed
    )
    policy = Reported(lambda seen: orders[int(seen.at_s) % len(orders)])
    outcome = simulate_fleet_fast(load, fleet_settings, policy)
    assert len(outcome.requests) == len(requests)
    for each in outcome.requests:
        assert each.ending in ("served", "refused", "lost")
        if each.ending == "served":
            assert each.ttft_ms is not None
            assert each.ttft_ms > 0
    served = Counter(each.num_output_tokens for each in outcome.requests if each.ending == "served")
    room = min(1200, num_blocks * 16 + 1)
    asked = Counter(max(1, min(r.num_output_tokens, room - max(1, r.num_prompt_tokens))) for r in requests)
    assert served <= asked
    assert outcome.pod_seconds <= 4 * outcome.duration_s + 1e-6
