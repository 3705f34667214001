"""The measured dispersion of arrivals: independent ones, clusters, slopes and steps."""

from __future__ import annotations

import random

import pytest

from pagemill_operator.autoscaler.memory import dispersion

NUM_DRAWN = 500


def poisson(source: random.Random, mean: float) -> int:
    at, number = source.expovariate(1.0), 0
    while at < mean:
        at, number = at + source.expovariate(1.0), number + 1
    return number


def test_independent_arrivals_rarely_count_as_clusters() -> None:
    source = random.Random(1)
    found = []
    for _ in range(NUM_DRAWN):
        mean, windows = source.uniform(0.2, 200.0), source.randint(0, 60)
        found.append(dispersion([poisson(source, mean) for _ in range(windows)]))
    assert sum(each >= 2.5 for each in found) <= 0.01 * NUM_DRAWN, "by chance, in few windows"


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
