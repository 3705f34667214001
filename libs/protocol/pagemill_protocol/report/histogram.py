"""Compact distributions that can be added across processes, with quantiles accurate to five percent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

BINS_PER_DOUBLING = 8
"""Relative resolution: a value is known within a factor of 2 ** (1/16), about four percent."""
LARGEST_BIN = 40 * BINS_PER_DOUBLING


class Histogram(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts of positive values in bins of equal ratio. Values of 1 and less share the lowest bin."""

    counts: dict[int, float] = {}
    """Bin -> count; the value of bin `b` is 2 ** (b / 8)."""

    @property
    def total(self) -> float:
        return sum(count for _, count in self._valid_bins())

    def quantile(self, share: float) -> float | None:
        """Return the value that a share `share` of the values does not exceed, or None without values."""
        total, seen = self.total, 0.0
        if total <= 0:
            return None
        wanted = share * total
        for index, count in sorted(self._valid_bins()):
            seen += count
            if seen >= wanted - 1e-9:
                return value_of(index)
        return value_of(max(self.counts))

    def mean(self) -> float | None:
        total = self.total
        if total <= 0:
            return None
        return sum(value_of(index) * count for index, count in self._valid_bins()) / total

    def squared_variation(self) -> float | None:
        """Return the variance divided by the square of the mean, or None without values."""
        mean = self.mean()
        if mean is None:
            return None
        squares = sum(value_of(index) ** 2 * count for index, count in self._valid_bins()) / self.total
        return max(0.0, squares / mean**2 - 1.0)

    def _valid_bins(self) -> Iterator[tuple[int, float]]:
        """Iterate over bins with a valid count; a peer may send anything."""
        return ((index, count) for index, count in self.counts.items() if 0 < count < math.inf)


def bin_of(value: float) -> int:
    """Return the bin of a value; NaN counts as the lowest."""
    if not value > 1:
        return 0
    return min(LARGEST_BIN, round(BINS_PER_DOUBLING * math.log2(value))) if value < math.inf else LARGEST_BIN


def value_of(index: int) -> float:
    return math.pow(2.0, max(0, min(LARGEST_BIN, index)) / BINS_PER_DOUBLING)


def histogram_of(values: Iterable[float]) -> Histogram:
    return Histogram(dict(Counter(bin_of(value) for value in values)))


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """Return the sum of several histograms."""
    counts: Counter[int] = Counter()
    for histogram in histograms:
        counts.update(dict(histogram._valid_bins()))
    return Histogram(dict(counts))
