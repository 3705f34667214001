"""The trend of arrivals: which rate and slope are found in counts of a few seconds, and what chance explains."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_operator.autoscaler.arrival_trend import LEAST_COUNTS, Trend, trend

WINDOW_S = 6.0
NUM_WINDOWS = 50


def ages(number: int) -> list[float]:
    return [WINDOW_S * (number - index - 0.5) for index in range(number)]


def found(counts: list[float], dispersion: float = 1.0) -> Trend:
    result = trend(counts, ages(len(counts)), WINDOW_S, dispersion)
    assert result is not None
    return result


def drawn(rate_at: Callable[[float], float], seed: int, until_s: float = WINDOW_S * NUM_WINDOWS) -> list[float]:
    """Return Poisson counts of the five minutes before `until_s`."""
    random, number = np.random.default_rng(seed), NUM_WINDOWS
    times_s = until_s - np.array(ages(number))
    return [float(random.poisson(rate_at(at_s) * WINDOW_S)) for at_s in times_s]


@pytest.mark.parametrize("rate", [0.8, 3.0, 11.0])
def test_a_constant_rate_is_the_mean_of_all_counts_and_chance_changes_nothing(rate: float) -> None:
    results = [found(drawn(lambda _: rate, seed)) for seed in range(200)]
    steady = [each for each in results if not each.slope and each.duration_s == WINDOW_S * NUM_WINDOWS]
    assert len(steady) >= 194, "four standard deviations are exceeded by chance in few of 200 draws"
    for each in steady:
        assert each.requests_per_s == pytest.approx(rate, abs=4 * math.sqrt(rate / (WINDOW_S * NUM_WINDOWS)))


@pytest.mark.parametrize("num_after", [2, 5, 20])
def test_after_a_step_only_the_counts_since_then_determine_the_rate(num_after: int) -> None:
    result = found([24.0] * (NUM_WINDOWS - num_after) + [66.0] * num_after)
    assert result == Trend(11.0, 0.0, WINDOW_S * num_after, 66.0 * num_after)


def test_a_line_is_found_with_its_slope_and_its_present_value() -> None:
    per_window = [60 - 0.6 * age / WINDOW_S for age in ages(NUM_WINDOWS)]
    result = found(per_window)
    assert result.requests_per_s == pytest.approx(10.0, rel=0.01)
    assert result.slope == pytest.approx(0.6 / WINDOW_S**2, rel=0.06)


def test_a_rise_that_began_a_minute_ago_is_found_with_its_slope() -> None:
    """The rate was 3 requests/s and rises by 0.05 requests/s each second."""
    slopes = []
    for seed in range(30):
        result = found(drawn(lambda at_s: 3.0 + 0.05 * max(0.0, at_s - 220.0), seed))
        assert result.requests_per_s == pytest.approx(7.0, rel=0.3)
        slopes.append(result.slope)
    assert sum(slope > 0 for slope in slopes) >= 24
    assert np.median([slope for slope in slopes if slope > 0]) == pytest.approx(0.05, rel=0.35)


def test_a_rise_that_has_ended_is_not_extrapolated() -> None:
    rising = [20.0 + 2 * index for index in range(30)]
    assert found(rising).slope > 0
    assert found([*rising, *[40.0] * 5]).slope <= 0


def test_a_change_that_clusters_explain_is_not_a_change() -> None:
    counts = [24.0] * 44 + [42.0] * 6
    assert found(counts).requests_per_s == pytest.approx(7.0)
    assert found(counts, dispersion=6.0).requests_per_s == pytest.approx(sum(counts) / 300, rel=0.01)


@settings(max_examples=num_examples(100))
@given(st.lists(st.integers(0, 400), min_size=LEAST_COUNTS, max_size=60), st.floats(1.0, 50.0))
def test_any_counts_have_a_finite_rate_of_zero_or_more(counts: list[int], dispersion: float) -> None:
    result = found([float(each) for each in counts], dispersion)
    assert 0 <= result.requests_per_s < math.inf
    assert math.isfinite(result.slope)
    assert 0 < result.duration_s <= WINDOW_S * len(counts)
    assert 0 <= result.num_requests <= sum(counts)
    if not sum(counts):
        assert result.requests_per_s == 0


@pytest.mark.parametrize("number", range(LEAST_COUNTS))
def test_too_few_counts_have_no_trend(number: int) -> None:
    assert trend([5.0] * number, ages(number), WINDOW_S, 1.0) is None
