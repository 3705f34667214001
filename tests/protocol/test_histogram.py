"""Histograms keep quantiles within a bin, can be added, and accept whatever a peer may send."""

from __future__ import annotations

import math
from statistics import fmean, pvariance

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_protocol.report.histogram import Histogram, bin_of, histogram_of, merged, value_of

VALUES = st.lists(st.floats(1.0, 1e9), min_size=1, max_size=200)


@given(VALUES, st.floats(0.01, 1.0))
def test_a_quantile_is_accurate_to_half_a_bin(values: list[float], share: float) -> None:
    exact = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    known = histogram_of(values).quantile(share)
    assert known is not None
    assert known == pytest.approx(exact, rel=2 ** (1 / 16) - 1 + 1e-6)


@given(VALUES, VALUES)
def test_the_sum_of_two_histograms_equals_one_of_all_values(first: list[float], second: list[float]) -> None:
    assert merged([histogram_of(first), histogram_of(second)]) == histogram_of(first + second)


@given(VALUES)
def test_the_variation_is_that_of_the_values_in_their_bins(values: list[float]) -> None:
    histogram = histogram_of(values)
    rounded = [value_of(bin_of(value)) for value in values]
    assert histogram.squared_variation() == pytest.approx(pvariance(rounded) / fmean(rounded) ** 2, rel=1e-6, abs=1e-9)


def test_an_empty_histogram_has_no_quantile_and_no_mean() -> None:
    assert (Histogram().quantile(0.5), Histogram().mean(), Histogram().total) == (None, None, 0)


@pytest.mark.parametrize("value", [math.nan, -1.0, 0.0, 1.0])
def test_a_value_that_is_no_positive_number_counts_as_the_smallest(value: float) -> None:
    assert bin_of(value) == 0
    assert math.isfinite(value_of(bin_of(math.inf)))


def test_impossible_counts_are_ignored() -> None:
    histogram = Histogram({8: 3.0, 16: math.nan, 24: -5.0, 32: math.inf})
    assert histogram.total == 3
    assert histogram.quantile(0.99) == 2.0
    assert histogram.mean() == 2.0


def test_a_histogram_survives_encoding() -> None:
    histogram = histogram_of([1, 5, 5, 900])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(histogram), type=Histogram) == histogram
    assert msgspec.json.decode(msgspec.json.encode(histogram), type=Histogram) == histogram
