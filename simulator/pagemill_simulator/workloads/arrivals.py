"""Arrival times of independent requests, at a rate that may change with time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator


def poisson(
    source: random.Random, rate_at: Callable[[float], float], *, most: float, duration_s: float
) -> Iterator[float]:
    """Yield rising seconds. `most` is at least every rate; arrivals at it are thinned out (Lewis and Shedler)."""
    now_s = 0.0
    while most > 0:
        now_s += source.expovariate(most)
        if now_s >= duration_s:
            return
        if source.random() * most < rate_at(now_s):
            yield now_s
