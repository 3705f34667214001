"""Properties of every autoscaling decision, whatever the input."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_world import LENGTHS, Scaled, arrivals, busy, engines, signals

from examples import num_examples
from pagemill_operator.autoscaler.demand import DemandPolicy
from pagemill_operator.autoscaler.memory import DOWN_STARTS, Memory
from pagemill_operator.autoscaler.records import Record, decode_record, encode_record, replay
from pagemill_operator.autoscaler.settings import Direction, ScalingSettings, Slo
from pagemill_operator.autoscaler.signals import Activity, Fleet, GatewayReport, merge
from pagemill_protocol.report.histogram import Histogram
from pagemill_protocol.report.load import Arrivals, DeploymentLoad, EnginesLoad, Latencies, Lengths, QueueLoad
from pagemill_protocol.report.state import StepTimeParams

COLD_START_S = 30.0
WINDOW_S = DOWN_STARTS * COLD_START_S
"""The time for which fewer replicas must suffice before one is removed."""
counts = st.integers(0, 10**6)
truths = st.sampled_from(["value", "unknown", "stale"])
policies = st.builds(
    lambda low, more, warm, kv, depth, slo, window: ScalingSettings(
        "Active", low, low + more, min(warm, low + more), kv, depth, slo, down=Direction(window)
    ),
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(0, 3),
    st.none() | st.floats(0.1, 1.0),
    st.none() | st.integers(0, 50),
    st.none() | st.just(Slo(500.0, 50.0)) | st.just(Slo(None, 5.0)),
    st.sampled_from([0.0, 60.0, 300.0]),
)


@st.composite
def instants(draw: st.DrawFn) -> dict[str, object]:
    replicas = draw(st.integers(0, 5))
    rate = draw(st.floats(0, 500))
    return {
        "engines": engines(
            replicas,
            active=draw(st.floats(0, 10)),
            running=draw(counts),
            waiting=draw(counts),
            truth=draw(truths),
        ),
        "queue": QueueLoad(num_requests=draw(counts), num_tokens=draw(counts)),
        "arrivals": arrivals(rate, burst=draw(st.floats(0, 900)), idle_s=draw(st.floats(0, 9000)))
        if draw(st.booleans())
        else Arrivals(),
        "lengths": draw(st.sampled_from([LENGTHS, Lengths()])),
        "num_gateways": draw(st.integers(0, 2)),
        "num_reporting": draw(st.integers(0, 2)),
    }


@settings(max_examples=num_examples(100), deadline=None)
@given(policies, st.lists(st.tuples(instants(), st.floats(0.1, 400)), min_size=1, max_size=12), st.integers(0, 30))
def test_bounds_hold_reasons_are_given_and_every_record_can_be_replayed(
    policy: ScalingSettings, story: list, replicas: int
) -> None:
    scaled = Scaled(policy, replicas=replicas)
    for fields, pause_s in story:
        decision = scaled.decide(**fields)
        assert policy.lowest <= decision.replicas <= policy.max_replicas
        assert decision.message
        if decision.replicas < decision.replicas_before:
            assert not decision.missing or decision.reason == "OutOfBounds"
        scaled.now += pause_s


@settings(max_examples=num_examples(50), deadline=None)
@given(instants(), st.integers(1, 20))
def test_missing_signals_never_remove_replicas(fields: dict[str, object], replicas: int) -> None:
    policy = ScalingSettings("Active", 0, 20, kv_cache_usage=0.8, down=Direction(0.0), idle_s=0.0)
    fields |= {"engines": EnginesLoad(truth="stale")}
    decision, _ = DemandPolicy().decide(policy, signals(replicas, **fields), Memory())
    assert decision.replicas >= replicas


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.3, 6.0), st.floats(0.0, 0.25))
def test_a_steady_noisy_load_settles_and_removes_at_most_the_excess(seed: int, demand: float, noise: float) -> None:
    rng = random.Random(seed)
    policy = ScalingSettings("Active", 1, 20, kv_cache_usage=0.8, queue_depth=4)
    scaled = Scaled(policy, replicas=math.ceil(demand / 0.8), cold_start_s=COLD_START_S)
    step_s = 5.0
    scaled.run(5400, lambda at, ready: busy(demand * (1 + rng.uniform(-noise, noise)), ready), step_s=step_s)
    fewest, most = (math.ceil(demand * (1 + change) / 0.8) for change in (-noise, noise))
    assert all(fewest <= after <= most for _, after in scaled.changes), scaled.changes
    # A rare peak takes a removal back; after that, the window of the next one is twice as long.
    removed_s = [step_s * at for at, each in enumerate(scaled.decisions) if each.replicas < each.replicas_before]
    assert all(later - earlier >= 2 * WINDOW_S for earlier, later in pairwise(removed_s)), scaled.changes


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32), st.floats(1.0, 40.0))
def test_poisson_arrivals_do_not_flap_under_an_slo(seed: int, rate: float) -> None:
    rng = random.Random(seed)
    seconds: list[int] = []

    def reported(at: float, ready: int) -> dict[str, object]:
        while len(seconds) < at + 61:
            seconds.append(_poisson(rng, rate))
        end = int(at) + 60
        window, burst = sum(seconds[end - 60 : end]) / 60, sum(seconds[end - 6 : end]) / 6
        return {"arrivals": arrivals(window, burst=burst), "active": 0.2 * ready}

    scaled = Scaled(ScalingSettings("Active", 1, 30, slo=Slo(500.0, 40.0)), replicas=1, cold_start_s=45.0)
    scaled.run(2400, reported, step_s=5.0)
    downs = [change for change in scaled.changes if change[1] < change[0]]
    assert len(downs) <= 1, scaled.changes


def _poisson(rng: random.Random, mean: float) -> int:
    count, left = 0, rng.expovariate(1.0)
    while left < mean:
        count, left = count + 1, left + rng.expovariate(1.0)
    return count


@settings(max_examples=num_examples(50), deadline=None)
@given(instants(), st.integers(0, 10))
def test_equal_input_gives_equal_decisions(fields: dict[str, object], replicas: int) -> None:
    policy = ScalingSettings("Active", 0, 20, kv_cache_usage=0.8, queue_depth=2, slo=Slo(500.0, 50.0))
    seen = signals(replicas, **fields, fleet=Fleet(wanted=replicas, ready=replicas))
    assert DemandPolicy().decide(policy, seen, Memory()) == DemandPolicy().decide(policy, seen, Memory())


numbers = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 0.5, 3.0, 1e12])


@st.composite
def reports(draw: st.DrawFn) -> DeploymentLoad:
    """Draw a gateway's report with arbitrary values."""
    histogram = st.builds(Histogram, st.dictionaries(st.integers(-5, 400), numbers, max_size=3))
    step_time = StepTimeParams(
        knots_tokens=[1, 64],
        knot_ms=[draw(numbers), draw(numbers)],
        decode_context_ms=draw(numbers),
        chunk_context_ms=draw(numbers),
        error_p50=draw(numbers),
        error_p95=draw(numbers),
    )
    return DeploymentLoad(
        namespace="ns",
        name="d",
        engines=engines(1, active=0.5, running=3, age_s=draw(numbers), step_time=step_time),
        queue=QueueLoad(num_requests=2, num_tokens=10, oldest_s=draw(numbers)),
        arrivals=Arrivals(
            truth="value",
            window_s=draw(numbers),
            requests_per_s=draw(numbers),
            tokens_per_s=draw(numbers),
            burst_window_s=draw(numbers),
            burst_requests_per_s=draw(numbers),
            idle_s=draw(numbers),
        ),
        latencies=Latencies(truth="value", ttft_ms=draw(histogram), tpot_ms=draw(histogram)),
        lengths=Lengths(truth="value", prompt=draw(histogram), computed=draw(histogram), output=draw(histogram)),
    )


@given(st.lists(reports(), max_size=2), st.booleans())
def test_records_of_arbitrary_reports_can_be_read_and_replayed(reported: list[DeploymentLoad], has_slo: bool) -> None:
    slo = Slo(500.0, 40.0) if has_slo else None
    policy = ScalingSettings("Active", 0, 9, slo=slo, kv_cache_usage=0.8, queue_depth=2)
    memory = Memory()
    for turn in range(2):
        seen = merge(
            [GatewayReport(load) for load in reported],
            Fleet(wanted=1, ready=1),
            num_gateways=len(reported),
            at_s=turn * 2.0,
        )
        before = memory
        decision, memory = DemandPolicy().decide(policy, seen, before)
        record = decode_record(encode_record(Record("ns/d", "", policy, seen, before, decision)))
        assert replay(record) == decision


@settings(max_examples=num_examples(20), deadline=None)
@given(
    cold_start_s=st.integers(1, 120),
    idle_s=st.integers(2, 150),
    apart_s=st.integers(5, 300),
    patience_s=st.integers(1, 200),
    name=st.sampled_from(["Demand", "TargetTracking"]),
)
def test_a_replica_that_was_started_serves_for_an_idle_window(
    cold_start_s: int, idle_s: int, apart_s: int, patience_s: int, name: str
) -> None:
    """Requests come at even times, wait for a replica, and leave when their patience ends."""
    wanted = ScalingSettings("Active", 0, 1, kv_cache_usage=0.8, idle_s=idle_s, policy=name)
    scaled = Scaled(wanted, replicas=0, cold_start_s=cold_start_s)
    scaled.activity = Activity()
    came = waiting_since = ready_since = None
    for second in range(3 * (cold_start_s + apart_s)):
        if second % apart_s == 0:
            came, waiting_since = second, second if waiting_since is None else waiting_since
        if scaled.ready:
            ready_since, waiting_since = second if ready_since is None else ready_since, None
        if waiting_since is not None and second - waiting_since >= patience_s:
            waiting_since = None
        queue = QueueLoad(num_requests=1, num_tokens=10) if waiting_since is not None else QueueLoad()
        was_ready = scaled.ready
        scaled.decide(arrivals=arrivals(0.0, idle_s=second - came), queue=queue)
        if was_ready and not scaled.wanted:
            assert second - ready_since >= idle_s
            assert second - came >= idle_s
        if not scaled.wanted:
            ready_since = None
        scaled.now += 1
