"""Compares two saved results: differences with confidence intervals, by the bootstrap.

Latencies are resampled by request, throughput by slices of time, since requests of one instant depend on each other
(Efron and Tibshirani, An Introduction to the Bootstrap, 1993).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill.bench.samples import LATENCIES, VALUES, BenchRun, BenchSample

RESAMPLES = 1000
CONFIDENCE = 0.95
MOST_VALUES = 2_000_000
"""Values that are weighted at once, which limits memory."""
MOST_SLICES = 20
FEWEST_GROUPS = 8
"""With fewer requests, or slices, an interval says nothing."""
SHARES = {"p50": 0.5, "p99": 0.99}


_Groups = Sequence[Sequence[float]]
_Pair = tuple[str, float | None, _Groups, _Groups]
"""A figure's name and share, and its values before and after."""


class Difference(NamedTuple):
    name: str
    before: float
    after: float
    low: float
    """Limits of the 95 % confidence interval of after / before."""
    high: float

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def is_certain(self) -> bool:
        """Whether the interval does not contain 1."""
        return not self.low <= 1.0 <= self.high

    def as_json(self) -> dict[str, float | bool]:
        numbers = {"before": self.before, "after": self.after, "ratio": self.ratio, "low": self.low, "high": self.high}
        return {name: round(value, 4) for name, value in numbers.items()} | {"differs": self.is_certain}


def differences(before: BenchRun, after: BenchRun, seed: int = 0) -> list[Difference]:
    """Return throughput and two percentiles of each latency; those for which both runs have enough requests."""
    source = np.random.default_rng(seed)
    pairs: list[_Pair] = [("output tokens/s", None, _slices(before), _slices(after))]
    for name in LATENCIES:
        old, new = ([[value * 1000 for value in VALUES[name](each)] for each in run.samples] for run in (before, after))
        pairs += [(f"{name.upper()} {shown}, ms", share, old, new) for shown, share in SHARES.items()]
    found = [
        _difference(name, _Figure(old, share), _Figure(new, share), source)
        for name, share, old, new in pairs
        if min(len(old), len(new)) >= FEWEST_GROUPS and any(map(any, old)) and any(map(any, new))
    ]
    return [each for each in found if each is not None]


class _Figure:
    """The mean, or the value at a share, of values that are drawn in groups."""

    def __init__(self, groups: _Groups, share: float | None) -> None:
        values = np.fromiter(chain.from_iterable(groups), np.float64)
        order = np.argsort(values)
        self._values, self._share, self._num_groups = values[order], share, len(groups)
        self._owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])[order]

    def whole(self) -> float:
        return float(self._weighted(np.ones((1, self._num_groups), np.int64))[0])

    def resampled(self, source: np.random.Generator) -> NDArray[np.float64]:
        """Return the figure of `RESAMPLES` draws of as many groups."""
        rows = max(1, MOST_VALUES // max(1, len(self._values)))
        parts = []
        for begin in range(0, RESAMPLES, rows):
            shape = (min(rows, RESAMPLES - begin), self._num_groups)
            drawn = source.integers(self._num_groups, size=shape)
            times = np.zeros(shape, np.int64)
            np.add.at(times, (np.arange(shape[0])[:, None], drawn), 1)
            parts.append(self._weighted(times))
        return np.concatenate(parts)

    def _weighted(self, times: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the figure for each row of numbers of times that the groups are counted."""
        weights = times[:, self._owners]
        if self._share is None:
            means: NDArray[np.float64] = (weights @ self._values) / weights.sum(axis=1)
            return means
        totals = np.cumsum(weights, axis=1)
        reached = totals >= np.maximum(1, self._share * totals[:, -1:])
        return np.where(totals[:, -1] > 0, self._values[reached.argmax(axis=1)], np.nan)


def _difference(name: str, before: _Figure, after: _Figure, source: np.random.Generator) -> Difference | None:
    """Return the difference; `None` where the figure before is 0, which no ratio describes."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = after.resampled(source) / before.resampled(source)
    ratios, old = ratios[np.isfinite(ratios)], before.whole()
    if not old or not ratios.size:
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Difference(name, old, after.whole(), float(low), float(high))


def _slices(run: BenchRun) -> list[list[float]]:
    """Return the output tokens per second of equal slices of the run, one value each."""
    count = min(MOST_SLICES, len(run.samples))
    width_s = run.wall_s / count if count else 0.0
    totals = [0.0] * count
    for sample in run.samples:
        for at_s, tokens in _tokens(sample):
            totals[min(count - 1, int(at_s / width_s))] += tokens
    return [[total / width_s] for total in totals]


def _tokens(sample: BenchSample) -> list[tuple[float, float]]:
    """Return when tokens came; those of a request are shared equally among its events."""
    at_s = sample.at_s + sample.ttft_s
    times = [at_s]
    for gap_s in sample.gaps_s:
        at_s += gap_s
        times.append(at_s)
    return [(each, sample.completion_tokens / len(times)) for each in times]
