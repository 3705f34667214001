"""The plots of simulated fleets as numbers: `svg.py` draws them into the page, `png.py` into pictures.

No chart has more points than can be distinguished, however long the simulation was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from pagemill_simulator.fleet.outcome import FleetOutcome, Served

BINS = 100
"""Number of bins over the time of a simulation."""
MOST_POINTS = 400
HIGH = 0.95

Point = tuple[float, float]


class ChartLine(NamedTuple):
    label: str
    points: Sequence[Point]
    hue: int
    """Selects colour and dashes; a policy has the same in all charts."""
    is_step: bool = False
    """Whether a value holds until the next point."""
    is_faint: bool = False
    is_solid: bool = False
    """Whether the line has no dashes, as the only one of its kind in the chart."""


class Mark(NamedTuple):
    """A straight line at one value."""

    label: str
    value: float
    is_upright: bool


class Chart(NamedTuple):
    name: str
    """Used in file names and ids."""
    title: str
    about: str
    """Description in words with the main numbers, for users who cannot see the chart."""
    x_label: str
    y_label: str
    lines: Sequence[ChartLine]
    is_x_log: bool = False
    is_y_log: bool = False
    marks: Sequence[Mark] = ()
    x_end: float | None = None
    """End of the horizontal axis, the same in all charts over time; None: the last point."""


class TimeUnit(NamedTuple):
    """The unit in which times are shown."""

    unit: str
    seconds: float

    @classmethod
    def of(cls, duration_s: float) -> TimeUnit:
        if duration_s <= 900:
            return cls("s", 1.0)
        return cls("min", 60.0) if duration_s <= 6 * 3600 else cls("h", 3600.0)


class ChartedRun(NamedTuple):
    """One policy's outcome, with a unique label."""

    label: str
    outcome: FleetOutcome
    hue: int


def charts_of(runs: Sequence[ChartedRun], *, slo_ttft_ms: float | None) -> list[Chart]:
    """Return the charts of policies under the same workload."""
    duration_s = max(run.outcome.duration_s for run in runs)
    clock = TimeUnit.of(duration_s)
    replicas = [_replicas(run, duration_s, clock) for run in runs]
    return [
        _arrivals(runs[0].outcome.requests, duration_s, clock),
        *replicas,
        _ttft_over_time(runs, duration_s, clock, slo_ttft_ms),
        _ttft_shares(runs, slo_ttft_ms),
    ]


def _arrivals(requests: Sequence[Served], duration_s: float, clock: TimeUnit) -> Chart:
    width_s = _width_s(duration_s)
    counts = [0] * _count(duration_s, width_s)
    for request in requests:
        counts[_bin(request.arrival_s, width_s, len(counts))] += 1
    rates = [count / width_s for count in counts]
    points = [(number * width_s / clock.seconds, rate) for number, rate in enumerate(rates)]
    points.append((duration_s / clock.seconds, rates[-1]))
    return Chart(
        "arrivals",
        "Arrivals",
        f"Requests per second over time: {len(requests):,} requests, at most {max(rates):.1f} per second.",
        f"time ({clock.unit})",
        "requests per second",
        [ChartLine("arrivals", points, 0, is_step=True, is_solid=True)],
        x_end=duration_s / clock.seconds,
    )


def _replicas(run: ChartedRun, duration_s: float, clock: TimeUnit) -> Chart:
    timeline, end_s = run.outcome.timeline, run.outcome.duration_s
    wanted, ready = (
        _steps([(point.at_s, float(value)) for point, value in each], end_s, clock)
        for each in ([(point, point.wanted) for point in timeline], [(point, point.ready) for point in timeline])
    )
    most = max((point.ready for point in timeline), default=0)
    return Chart(
        f"replicas-{run.hue}",
        f"Replicas: {run.label}",
        f"Replicas wanted and ready over time under {run.label}: at most {most} ready.",
        f"time ({clock.unit})",
        "replicas",
        [
            ChartLine("wanted", wanted, run.hue, is_step=True, is_faint=True),
            ChartLine("ready", ready, run.hue, is_step=True, is_solid=True),
        ],
        x_end=duration_s / clock.seconds,
    )


def _ttft_over_time(runs: Sequence[ChartedRun], duration_s: float, clock: TimeUnit, slo_ttft_ms: float | None) -> Chart:
    width_s = _width_s(duration_s)
    lines = []
    for run in runs:
        bins: list[list[float]] = [[] for _ in range(_count(duration_s, width_s))]
        for request in run.outcome.requests:
            if request.ttft_ms is not None:
                bins[_bin(request.arrival_s, width_s, len(bins))].append(request.ttft_ms / 1000)
        points = [
            ((number + 0.5) * width_s / clock.seconds, nearest_rank(sorted(values), HIGH))
            for number, values in enumerate(bins)
            if values
        ]
        lines.append(ChartLine(run.label, points, run.hue))
    texts = ", ".join(f"{line.label} at most {max((y for _, y in line.points), default=0):.2f} s" for line in lines)
    return Chart(
        "ttft",
        "Time to first token over time",
        f"95th percentile of the time to first token, by arrival: {texts}.",
        f"time of arrival ({clock.unit})",
        "TTFT p95 (s)",
        lines,
        is_y_log=True,
        marks=_slo_mark(slo_ttft_ms, is_upright=False),
        x_end=duration_s / clock.seconds,
    )


def _ttft_shares(runs: Sequence[ChartedRun], slo_ttft_ms: float | None) -> Chart:
    """Chart the shares of requests by TTFT; requests without a first token never count as fast enough."""
    lines, texts = [], []
    for run in runs:
        requests = run.outcome.requests
        values = sorted(request.ttft_ms / 1000 for request in requests if request.ttft_ms is not None)
        shares = [(value, number / len(requests)) for number, value in enumerate(values, start=1)]
        lines.append(ChartLine(run.label, _thinned(shares), run.hue, is_step=True))
        texts.append(f"{run.label} {nearest_rank(values, 0.5):.2f} s" if values else f"{run.label} none")
    return Chart(
        "ttft-shares",
        "Shares of the time to first token",
        f"Share of all requests whose first token came within a time; medians: {', '.join(texts)}.",
        "TTFT (s)",
        "share of requests",
        lines,
        is_x_log=True,
        marks=_slo_mark(slo_ttft_ms, is_upright=True),
    )


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _slo_mark(slo_ttft_ms: float | None, *, is_upright: bool) -> list[Mark]:
    return [] if slo_ttft_ms is None else [Mark("SLO", slo_ttft_ms / 1000, is_upright)]


def _width_s(duration_s: float) -> float:
    """Return the width of a bin, at least a second."""
    return max(1.0, duration_s / BINS)


def _count(duration_s: float, width_s: float) -> int:
    return max(1, math.ceil(duration_s / width_s))


def _bin(at_s: float, width_s: float, count: int) -> int:
    return min(count - 1, max(0, int(at_s / width_s)))


def _steps(points: Sequence[Point], end_s: float, clock: TimeUnit) -> list[Point]:
    """Return only the changes, and the end."""
    changes = [points[0], *(after for before, after in pairwise(points) if after[1] != before[1])] if points else []
    kept = _peaks(changes, end_s)
    if kept:
        kept.append((max(end_s, kept[-1][0]), kept[-1][1]))
    return [(at_s / clock.seconds, value) for at_s, value in kept]


def _peaks(points: list[Point], end_s: float) -> list[Point]:
    """Thin out points: keep the highest and the last of each of many short intervals."""
    if len(points) <= MOST_POINTS:
        return points
    width_s = max(end_s, points[-1][0]) / (MOST_POINTS // 2)
    groups: dict[int, list[Point]] = {}
    for point in points:
        groups.setdefault(int(point[0] / width_s), []).append(point)
    kept: list[Point] = []
    for group in groups.values():
        kept.append((group[0][0], max(value for _, value in group)))
        kept.append(group[-1])
    return kept


def _thinned(points: list[Point]) -> list[Point]:
    if len(points) <= MOST_POINTS:
        return points
    chosen: Iterable[int] = (round(number * (len(points) - 1) / (MOST_POINTS - 1)) for number in range(MOST_POINTS))
    return [points[number] for number in chosen]
