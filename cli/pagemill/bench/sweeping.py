"""Finds a server's saturation point: doubles the clients until throughput stops growing, then tries rates below it.

Each point is a run of `sending` with texts of its own, so that none finds the prefixes of another in a cache.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from pagemill.bench.samples import BenchRun, LatencyLimits
from pagemill.bench.sending import Load

GROWTH = 1.05
"""The least growth of output tokens per second by twice as many clients, below which a server is saturated."""
MOST_CLIENTS = 4096
RATE_SHARES = (0.25, 0.5, 0.7, 0.85, 1.0, 1.15)
"""Of the requests per second at saturation, the rates that a sweep of rates tries."""
GOOD_SHARE = 0.95
"""The share of requests that must keep the SLO at a rate that counts as served."""


class Point(NamedTuple):
    load: Load
    run: BenchRun


Measure = Callable[[Load, int], Awaitable[BenchRun]]
"""Measures at a load; the number is that of the point."""


async def sweep_clients(measure: Measure) -> list[Point]:
    """Double the number of clients until two steps together add less than `GROWTH`, or requests fail."""
    points: list[Point] = []
    clients = 1
    while clients <= MOST_CLIENTS:
        load = Load(concurrency=clients)
        points.append(Point(load, await measure(load, len(points))))
        if points[-1].run.errors or _is_saturated(points):
            break
        clients *= 2
    return points


async def sweep_rates(measure: Measure, burstiness: float) -> list[Point]:
    """Find the saturation with clients, then measure rates around it; return both."""
    points = await sweep_clients(measure)
    run = saturation(points).run
    most = len(run.samples) / run.wall_s if run.wall_s else 0.0
    for share in RATE_SHARES if most else ():
        load = Load(rate_per_s=round(most * share, 4), burstiness=burstiness)
        points.append(Point(load, await measure(load, len(points))))
    return points


def _is_saturated(points: Sequence[Point]) -> bool:
    rates = [point.run.output_tokens_per_s for point in points]
    return len(rates) > 2 and max(rates[-2:]) < GROWTH * max(rates[:-2])


def saturation(points: Sequence[Point]) -> Point:
    """Return the point with the fewest clients that has nearly the highest throughput."""
    closed = [point for point in points if point.load.concurrency is not None]
    most = max(point.run.output_tokens_per_s for point in closed)
    return next(point for point in closed if point.run.output_tokens_per_s * GROWTH >= most)


def highest_good(points: Sequence[Point], slo: LatencyLimits) -> Point | None:
    """Return the highest load at which `GOOD_SHARE` of all requests keep the SLO; rates where some were measured."""
    rated = [point for point in points if point.load.rate_per_s is not None]
    return next((point for point in reversed(rated or points) if _good_share(point.run, slo) >= GOOD_SHARE), None)


def _good_share(run: BenchRun, slo: LatencyLimits) -> float:
    return sum(map(slo.kept, run.samples)) / max(1, run.num_started)
