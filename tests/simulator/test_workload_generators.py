"""Generated workloads: their rates, their lengths, and equal requests for equal seeds."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_simulator.parameters import ParameterError, split_choice
from pagemill_simulator.workloads.agentic import Agentic
from pagemill_simulator.workloads.generators import GENERATORS, make_generator
from pagemill_simulator.workloads.lengths import LogNormal
from pagemill_simulator.workloads.request import SimRequest, Workload
from pagemill_simulator.workloads.shapes import Burst, Diurnal, Ramp, Shaped, Sine, Steady, Step

SHORT = {"diurnal": {"compress": "96"}}


def rate(workload: Workload, begin_s: float, end_s: float) -> float:
    return sum(begin_s <= request.arrival_s < end_s for request in workload.requests) / (end_s - begin_s)


def near(expected_per_s: float, over_s: float) -> object:
    """Return an approximation within four standard deviations of Poisson arrivals."""
    return pytest.approx(expected_per_s, abs=4 * math.sqrt(expected_per_s * over_s) / over_s)


@pytest.mark.parametrize("name", GENERATORS)
def test_equal_seeds_give_equal_requests_and_another_seed_gives_others(name: str) -> None:
    parameters = SHORT.get(name, {})
    workload = make_generator(name, parameters).workload(1)
    assert workload == make_generator(name, parameters).workload(1)
    assert workload.requests != make_generator(name, parameters).workload(2).requests
    assert workload.name == name
    assert workload.source.startswith(f"{name}(")
    assert workload.source.endswith("seed 1")
    arrivals = [request.arrival_s for request in workload.requests]
    assert arrivals == sorted(arrivals)
    assert 0 <= arrivals[0] <= arrivals[-1] < workload.duration_s
    assert min(min(request[1:3]) for request in workload.requests) >= 1


def test_a_ramp_rises_from_one_rate_to_the_other() -> None:
    workload = Ramp(from_rate=2, to_rate=10, before_s=1000, over_s=1000, after_s=1000).workload(3)
    assert rate(workload, 0, 1000) == near(2, 1000)
    assert rate(workload, 1000, 1500) == near(4, 500)
    assert rate(workload, 1500, 2000) == near(8, 500)
    assert rate(workload, 2000, 3000) == near(10, 1000)
    assert workload.duration_s == 3000


def test_a_burst_is_ten_times_the_rate_for_a_while() -> None:
    workload = Burst(rate=2, at_s=500, for_s=200, duration_s=1200).workload(3)
    assert rate(workload, 0, 500) == near(2, 500)
    assert rate(workload, 500, 700) == near(20, 200)
    assert rate(workload, 700, 1200) == near(2, 500)


def test_a_step_is_permanent() -> None:
    workload = Step(from_rate=1, to_rate=6, at_s=500, duration_s=1000).workload(3)
    assert rate(workload, 0, 500) == near(1, 500)
    assert rate(workload, 500, 1000) == near(6, 500)


def test_a_day_has_its_minimum_at_four_and_its_maximum_at_sixteen_however_long_it_lasts() -> None:
    for compress in (1.0, 24.0):
        day = Diurnal(low_rate=0.5, high_rate=10, compress=compress)
        assert day.rate_at(4 * 3600 / compress) == pytest.approx(0.5)
        assert day.rate_at(16 * 3600 / compress) == pytest.approx(10)
        assert day.length_s == 86_400 / compress
    hour = Diurnal(low_rate=0.5, high_rate=10, compress=24).workload(3)
    assert rate(hour, 0, 3600) == near(5.25, 3600)


def test_a_sine_varies_around_its_mean() -> None:
    workload = Sine(rate=5, swing=0.8, period_s=1000, duration_s=4000).workload(3)
    quarters = [[each.arrival_s % 1000 // 250 for each in workload.requests].count(quarter) for quarter in range(4)]
    assert rate(workload, 0, 4000) == near(5, 4000)
    assert quarters[0] / 1000 == pytest.approx(5 * (1 + 0.8 * 2 / math.pi), rel=0.1)
    assert quarters[3] / 1000 == pytest.approx(5 * (1 - 0.8 * 2 / math.pi), rel=0.15)


def test_gaps_of_steady_traffic_are_exponentially_distributed() -> None:
    arrivals = [request.arrival_s for request in Steady(rate=5, duration_s=4000).workload(3).requests]
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)


def test_by_default_lengths_have_the_moments_of_azures_conversations() -> None:
    requests = Steady(rate=10, duration_s=2000).workload(1).requests
    for tokens, mean, sigma in (
        ([request.num_prompt_tokens for request in requests], 1155, 0.985),
        ([request.num_output_tokens for request in requests], 211, 0.859),
    ):
        assert statistics.mean(tokens) == pytest.approx(mean, rel=0.03)
        assert statistics.stdev(math.log(each) for each in tokens) == pytest.approx(sigma, rel=0.05)
    given_means = Steady(
        rate=10, duration_s=2000, prompt_tokens=4000, output_tokens=1000, longest_prompt=8000, longest_output=8000
    )
    drawn = given_means.workload(1).requests
    assert statistics.mean(request.num_prompt_tokens for request in drawn) == pytest.approx(4000, rel=0.03)
    assert statistics.mean(request.num_output_tokens for request in drawn) == pytest.approx(1000, rel=0.03)
    assert max(request.num_prompt_tokens for request in drawn) == 8000


def test_without_a_spread_all_lengths_are_equal() -> None:
    requests = Steady(prompt_tokens=100, output_tokens=20, prompt_sigma=0, output_sigma=0).workload(1).requests
    assert {request[1:3] for request in requests} == {(100, 20)}


def test_agents_send_the_whole_conversation_in_each_call() -> None:
    agents = Agentic(sessions_per_s=0.2, duration_s=3000)
    sessions: dict[int | None, list[SimRequest]] = defaultdict(list)
    for request in agents.workload(5).requests:
        sessions[request.session].append(request)
    assert len(sessions) / agents.duration_s == near(0.2, 3000)
    for calls in sessions.values():
        for before, after in itertools.pairwise(calls):
            assert after.num_prompt_tokens > before.num_prompt_tokens + before.num_output_tokens
            assert after.arrival_s >= before.arrival_s + agents.token_s * before.num_output_tokens
    begun_early = [calls for calls in sessions.values() if calls[0].arrival_s < 1500]
    assert 4 < statistics.mean(map(len, begun_early)) < agents.turns * agents.calls, (
        "the longest prompt must end some conversations"
    )
    assert max(request.num_prompt_tokens for calls in sessions.values() for request in calls) <= agents.longest_prompt


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("waves", {}, "there is no workload 'waves'; there are steady, ramp"),
        ("ramp", {"form_rate": "2"}, "ramp: there is no parameter 'form_rate'; there are .*from_rate"),
        ("ramp", {"to_rate": "fast"}, "ramp: to_rate: 'fast' will not do: expected `float`"),
        ("ramp", {"to_rate": "nan"}, "to_rate: 'nan' will not do: expected `float` >= 0.0"),
        ("ramp", {"to_rate": "inf"}, "to_rate: 'inf' will not do"),
        ("steady", {"rate": "-1"}, "rate: '-1' will not do: expected `float` > 0.0"),
        ("steady", {"rate": "1e9"}, "more than 50,000,000 requests; lower the rate or the duration"),
        ("steady", {"output_tokens": "2000"}, "nothing longer than 1000; raise longest_output"),
        ("ramp", {"before_s": "0", "over_s": "0", "after_s": "0"}, "no duration"),
        ("diurnal", {"low_rate": "20"}, "low_rate: 20 is above high_rate 10"),
        ("agentic", {"calls": "1e9"}, "more than 50,000,000 requests"),
        ("agentic", {"longest_prompt": "10"}, "raise longest_prompt"),
    ],
)
def test_impossible_parameters_are_named(name: str, parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make_generator(name, parameters)


def test_a_workload_is_selected_by_name_and_parameters() -> None:
    assert split_choice("ramp") == ("ramp", {})
    assert split_choice("ramp:from_rate=2, to_rate=10") == ("ramp", {"from_rate": "2", "to_rate": "10"})
    for text in ("ramp:from_rate", "ramp:=2", "ramp:from_rate="):
        with pytest.raises(ParameterError, match="write NAME:PARAMETER=VALUE"):
            split_choice(text)


@given(
    mean=st.floats(0.001, 1e6),
    sigma=st.floats(0, 4),
    slack=st.floats(1, 1e4),
    seed=st.integers(0, 2**32),
)
def test_lengths_are_between_one_and_the_maximum(mean: float, sigma: float, slack: float, seed: int) -> None:
    longest = max(1, math.ceil(mean * slack))
    drawn = LogNormal(mean, sigma, longest)
    source = random.Random(seed)
    assert all(1 <= drawn.draw(source) <= longest for _ in range(20))


@given(kind=st.sampled_from([each for each in GENERATORS.values() if issubclass(each, Shaped)]), share=st.floats(0, 1))
def test_no_rate_exceeds_the_maximum(kind: type[Shaped], share: float) -> None:
    shape = kind()
    assert 0 <= shape.rate_at(share * shape.length_s) <= shape.most_per_s * (1 + 1e-12)
