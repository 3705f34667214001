"""The trend of the arrivals: their present rate and its slope, from the numbers of requests in the past minutes.

Five hypotheses are compared: a constant rate, a straight line, and one change within the past minutes, after which the
rate is another constant, a line that begins at the earlier rate, or a line of its own. Each is judged by its Poisson
deviance (Gaussian where a line is fitted), divided by the dispersion of the arrivals; a change and a slope each cost
`SIGNIFICANT_SPREADS` squared, so that chance alone makes neither. All sums are over prefixes, so all times of a change
are compared at once. Neighbours: `memory` keeps the counts, `expected_load` extrapolates the trend.

Source of the penalty: Killick, Fearnhead and Eckley, Optimal detection of changepoints, 2012.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SIGNIFICANT_SPREADS = 4.0
"""Standard deviations that a change of the rate, or its slope, must exceed."""
LEAST_COUNTS = 3
"""The fewest counts that a trend is computed from."""
LEAST_ON_LINE = 5
"""The fewest counts that a line is fitted to."""
LEAST_VARIANCE = 0.5
"""The least variance of a count about a line, since few arrivals do not determine it."""
RECENT = 5
"""The latest counts that a line is compared with."""

Vector = NDArray[np.float64]


class Trend(NamedTuple):
    """The rate now and its slope."""

    requests_per_s: float
    slope: float = 0.0
    """Requests per second, each second; 0 where none is significant."""
    duration_s: float = 0.0
    """The time for which it has lasted."""
    num_requests: float = 0.0
    """The requests within that time."""


class _Sums(NamedTuple):
    """Sums over the latest 1, 2, ... counts `n` at the times `x`."""

    m: Vector
    n: Vector
    nn: Vector
    n_log_n: Vector
    x: Vector
    xx: Vector
    xn: Vector


def trend(counts: Sequence[float], ages_s: Sequence[float], window_s: float, dispersion: float) -> Trend | None:
    """Return the trend of `counts` of requests, each within `window_s` seconds; None where there are too few.

    `ages_s` are the times since the windows' middles, of the same length and order: the oldest first.
    """
    if len(counts) < LEAST_COUNTS or window_s <= 0:
        return None
    n, x = np.asarray(counts, float)[::-1], -np.asarray(ages_s, float)[::-1]
    sums = _sums(n, x)
    costs, levels, slopes = _hypotheses(sums, x, max(1.0, dispersion))
    best = int(np.argmin(costs))
    num_after = best % len(n)
    level, slope = float(levels[best]), float(slopes[best])
    if slope:
        level, slope = _corrected(n, x, level, slope, max(1.0, dispersion))
    return Trend(max(0.0, level) / window_s, slope / window_s, window_s * (num_after + 1), float(sums.n[num_after]))


def _corrected(n: Vector, x: Vector, level: float, slope: float, dispersion: float) -> tuple[float, float]:
    """Return level and slope after a look at the latest counts: a rise may have ended, or grown steeper.

    The level is moved by their mean distance from the line, shrunk by what chance explains of it (James and Stein). A
    rise that they are below by more than chance explains is not extrapolated.
    """
    recent, fitted = n[:RECENT].mean(), level + slope * x[:RECENT].mean()
    variance = dispersion * max(recent, fitted, 1.0) / RECENT
    distance = float(recent - fitted)
    if distance**2 <= variance:
        return level, slope
    ended = slope > 0 > distance
    return level + distance * float(1 - variance / distance**2), 0.0 if ended else slope


def _sums(n: Vector, x: Vector) -> _Sums:
    n_log_n = np.where(n > 0, n * np.log(np.maximum(n, 1e-9)), 0.0)
    parts = (np.ones_like(n), n, n * n, n_log_n, x, x * x, x * n)
    return _Sums(*(np.cumsum(each) for each in parts))


def _hypotheses(sums: _Sums, x: Vector, dispersion: float) -> tuple[Vector, Vector, Vector]:
    """Return cost, level at time 0 and slope of the hypotheses, for each number of counts after the change.

    The last entry of each hypothesis has no change.
    """
    earlier = _Sums(*(each[-1] - each for each in sums))
    penalty = SIGNIFICANT_SPREADS**2
    before = _deviance(earlier) / dispersion + np.where(earlier.m > 0, penalty, 0.0)
    mean = sums.n / sums.m
    variance = dispersion * np.maximum(mean, LEAST_VARIANCE)
    zero = np.zeros_like(mean)

    constant = before + _deviance(sums) / dispersion
    spread_xx = sums.xx - sums.x**2 / sums.m
    spread_xn = sums.xn - sums.x * mean
    is_line = (sums.m >= LEAST_ON_LINE) & (spread_xx > 0) & (mean > 0)
    slope = np.divide(spread_xn, spread_xx, out=zero.copy(), where=is_line)
    squares = sums.nn - sums.n * mean - slope * spread_xn
    line = np.where(is_line, before + squares / variance + penalty, np.inf)
    line_level = mean - slope * sums.x / sums.m

    # A line that begins at the earlier rate.
    is_bend = (sums.m >= LEAST_ON_LINE) & (earlier.m >= LEAST_COUNTS)
    start = np.divide(earlier.n, earlier.m, out=zero.copy(), where=is_bend)
    at = np.append((x[:-1] + x[1:]) / 2, x[-1])
    bend_xx = sums.xx - 2 * at * sums.x + sums.m * at**2
    bend_xn = sums.xn - at * sums.n - start * (sums.x - at * sums.m)
    bend = np.divide(bend_xn, bend_xx, out=zero.copy(), where=is_bend)
    squares = sums.nn - 2 * start * sums.n + sums.m * start**2 - bend * bend_xn
    bent = np.where(is_bend, before + squares / variance, np.inf)

    costs = np.concatenate([constant, line, bent])
    levels = np.concatenate([mean, line_level, start - bend * at])
    return costs, levels, np.concatenate([zero, slope, bend])


def _deviance(sums: _Sums) -> Vector:
    """Return the Poisson deviance of the counts from their mean."""
    is_any = (sums.m > 0) & (sums.n > 0)
    log_mean = np.log(np.divide(sums.n, sums.m, out=np.ones_like(sums.n), where=is_any))
    return np.where(is_any, np.maximum(0.0, 2 * (sums.n_log_n - sums.n * log_mean)), 0.0)
