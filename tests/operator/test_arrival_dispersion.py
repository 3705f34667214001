"""The measured dispersion of arrivals: independent ones, clusters, slopes and steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_operator.autoscaler.memory import dispersion


def poisson(source: random.Random, mean: float) -> int:
    at, number = source.expovariate(1.0), 0
    while at < mean:
        at, number = at + source.expovariate(1.0), number + 1
    return number


@settings(max_examples=num_examples(60), deadline=None)
@given(st.integers(0, 10_000), st.floats(0.2, 200.0), st.integers(0, 60))
def test_independent_arrivals_rarely_count_as_clusters(seed: int, mean: float, windows: int) -> None:
    source = random.Random(seed)
    assert dispersion([poisson(source, mean) for _ in range(windows)]) < 2.5


@pytest.mark.parametrize("size", [5, 15, 40])
def test_clusters_have_the_dispersion_of_their_size(size: int) -> None:
    source = random.Random(size)
    found = dispersion([size * poisson(source, 1.5) for _ in range(400)])
    assert 0.5 * size < found < 1.5 * size


@pytest.mark.parametrize("height", [4, 10])
def test_a_slope_or_a_step_is_not_dispersion(height: int) -> None:
    source = random.Random(height)
    rising = [poisson(source, 20 + 20 * height * window / 50) for window in range(50)]
    step = [poisson(source, 20 if window < 30 else 20 * height) for window in range(50)]
    assert dispersion(rising) < 1.5
    assert dispersion(step) < 1.5


def test_a_few_windows_are_not_sufficient() -> None:
    assert dispersion([0, 90, 0, 90, 0]) == 1.0
    assert dispersion([]) == dispersion([0.0] * 50) == 1.0
    assert dispersion([0, 90] * 4) > 10.0
