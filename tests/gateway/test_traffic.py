"""A gateway's statistics of its own requests: rates, latencies and lengths, on a simulated clock."""

from __future__ import annotations

import pytest
from hand_clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from pagemill_routing.brain.interface import RequestOutcome
from pagemill_routing.brain.load.traffic import WINDOW_S, TrafficMeter

KEY = "ns/d"


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def traffic(clock: Clock) -> TrafficMeter:
    traffic = TrafficMeter(clock)
    traffic.keep({KEY})
    return traffic


def outcome(**fields: int | float | None) -> RequestOutcome:
    known = {"num_prompt_tokens": 100, "num_cached_tokens": 64, "num_output_tokens": 20}
    return RequestOutcome(KEY, **(known | fields))  # type: ignore[arg-type]


def test_rates_are_measured_over_a_minute_and_over_the_last_seconds(traffic: TrafficMeter, clock: Clock) -> None:
    for second in range(60):
        clock.now = 1000.0 + second
        for _ in range(5 if second >= 54 else 1):
            traffic.arrived(KEY, 10, clock.now)
    clock.now = 1060.0
    arrivals = traffic.arrivals(KEY)
    assert (arrivals.truth, arrivals.window_s, arrivals.burst_window_s) == ("value", 60.0, 6.0)
    assert arrivals.requests_per_s == pytest.approx((54 + 30) / 60, abs=0.02)
    assert arrivals.burst_requests_per_s == pytest.approx(5.0, abs=1.0)
    assert arrivals.tokens_per_s == pytest.approx(14.0, abs=0.2)
    assert arrivals.idle_s == 1.0


def test_no_traffic_is_zero_and_an_unknown_deployment_is_unknown(traffic: TrafficMeter, clock: Clock) -> None:
    clock.now += 300
    arrivals = traffic.arrivals(KEY)
    assert (arrivals.truth, arrivals.requests_per_s, arrivals.idle_s) == ("value", 0.0, 300.0)
    assert traffic.arrivals("ns/other").truth == "unknown"
    assert traffic.latencies(KEY).truth == "unknown"
    assert traffic.lengths(KEY).truth == "unknown"


def test_a_deployment_with_a_running_request_is_not_idle(traffic: TrafficMeter, clock: Clock) -> None:
    traffic.arrived(KEY, 1, clock.now)
    clock.now += 500
    assert traffic.arrivals(KEY, busy=True).idle_s == 0.0
    clock.now += 20
    assert traffic.arrivals(KEY).idle_s == 20.0


def test_waiting_requests_count_at_their_arrival(traffic: TrafficMeter, clock: Clock) -> None:
    clock.now = 1060.0
    for at in range(1010, 1050):
        traffic.arrived(KEY, 1, float(at))
    arrivals = traffic.arrivals(KEY)
    assert arrivals.burst_requests_per_s == 0.0
    assert arrivals.requests_per_s == pytest.approx(40 / 60, abs=1e-3)


@given(st.lists(st.floats(0, 3 * WINDOW_S), min_size=1, max_size=100))
def test_every_arrival_of_the_window_counts_once_in_any_order(ages: list[float]) -> None:
    clock = Clock(1000.0)
    traffic = TrafficMeter(clock)
    traffic.keep({KEY})
    clock.now = 2000.0
    for age in ages:
        traffic.arrived(KEY, 1, clock.now - age)
    counted = round(traffic.arrivals(KEY).requests_per_s * WINDOW_S)
    surely = sum(age < WINDOW_S - 1 for age in ages)
    assert surely <= counted <= sum(age <= WINDOW_S for age in ages)


def test_latencies_cover_the_last_minute_and_lengths_the_last_requests(traffic: TrafficMeter, clock: Clock) -> None:
    for _ in range(10):
        traffic.record_outcome(outcome(ttft_ms=100.0, tpot_ms=20.0))
    latencies = traffic.latencies(KEY)
    assert latencies.ttft_ms.quantile(0.95) == pytest.approx(100, rel=0.05)
    assert latencies.tpot_ms.quantile(0.95) == pytest.approx(20, rel=0.05)
    clock.now += 2 * WINDOW_S
    assert traffic.latencies(KEY).truth == "unknown"
    lengths = traffic.lengths(KEY)
    assert lengths.truth == "value"
    assert lengths.computed.mean() == pytest.approx(36, rel=0.05)
    assert lengths.output.mean() == pytest.approx(20, rel=0.05)


def test_a_changed_workload_is_learned(traffic: TrafficMeter) -> None:
    for _ in range(3000):
        traffic.record_outcome(outcome(num_output_tokens=10))
    for _ in range(3000):
        traffic.record_outcome(outcome(num_output_tokens=1000))
    assert traffic.lengths(KEY).output.mean() == pytest.approx(1000, rel=0.1)


def test_answers_that_are_not_streamed_have_lengths_but_no_latency(traffic: TrafficMeter) -> None:
    traffic.record_outcome(outcome())
    assert traffic.latencies(KEY).truth == "unknown"
    assert traffic.lengths(KEY).truth == "value"


def test_a_deleted_deployment_is_removed(traffic: TrafficMeter) -> None:
    traffic.arrived(KEY, 1, 0.0)
    traffic.keep(set())
    traffic.record_outcome(outcome())
    assert traffic.arrivals(KEY).truth == "unknown"


def test_a_request_that_waits_for_the_first_engine_counts_at_once_and_its_tokens_once_known(
    traffic: TrafficMeter, clock: Clock
) -> None:
    traffic.arrived(KEY, 0, clock.now)
    clock.now += 3
    assert traffic.arrivals(KEY).requests_per_s == pytest.approx(1 / 3, abs=1e-3)
    clock.now += 57
    traffic.arrived(KEY, 600, 1000.0, num_requests=0)
    arrivals = traffic.arrivals(KEY)
    assert (arrivals.requests_per_s, arrivals.tokens_per_s) == (pytest.approx(1 / 60, abs=1e-3), 10.0)
    assert arrivals.burst_requests_per_s == 0.0
