"""Scales of a chart: the numbers at an axis, and the position of a value between its ends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

WANTED_TICKS = 5
SMALLEST = 1e-9
MOST_RATIO = 1e6
"""Largest ratio of a logarithmic axis; smaller values are placed at its low end."""
NEAR_DECADES = 1.5
"""Number of decades below which a logarithmic axis has more ticks than the powers of ten."""


class Axis(NamedTuple):
    low: float
    high: float
    ticks: list[float]
    is_log: bool

    def place(self, value: float) -> float:
        """Return the position, 0 at the low end and 1 at the high one; values outside are clamped."""
        low, high, at = self.low, self.high, min(self.high, max(self.low, value))
        if self.is_log:
            return (math.log(at) - math.log(low)) / (math.log(high) - math.log(low))
        return (at - low) / (high - low)


def axis_of(values: Iterable[float], *, is_log: bool, end: float | None = None) -> Axis:
    """Return an axis that ends at or beyond the values, or at `end`; a linear axis begins at 0."""
    sound = [max(value, SMALLEST) for value in values if math.isfinite(value) and (value > 0 or not is_log)]
    return _log_axis(sound) if is_log else _linear_axis(sound, end)


def _linear_axis(values: list[float], end: float | None) -> Axis:
    most = (max([*values, 0.0]) if end is None else end) or 1.0
    rough = most / WANTED_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    if end is not None:
        return Axis(0.0, most, [number * step for number in range(math.floor(most / step + 1e-9) + 1)], False)
    count = math.ceil(most / step - 1e-9)
    return Axis(0.0, count * step, [number * step for number in range(count + 1)], False)


def _log_axis(values: list[float]) -> Axis:
    high = max(values, default=10.0)
    low = max(min(values, default=0.1), high / MOST_RATIO)
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    factors = (1, 2, 5) if last - first <= NEAR_DECADES else (1,)
    every = max(1, (last - first) // 6)
    ticks = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    return Axis(10.0**first, 10.0**last, [tick for tick in ticks if tick <= 10.0**last * (1 + 1e-9)], True)


def shown(value: float) -> str:
    """Return a number in the format of an axis."""
    if value >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
