"""Evaluates the results of `scaling_table`: rows for the documentation, and whether each cell meets the goals.

Pure functions: lines of JSON in, text out. The goals are against `informed`, which learns of a change when it happens,
and against the rivals; a cell counts if `informed` itself meets the SLO.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from report import markdown_table

OURS, TARGETS, INFORMED, CLAIRVOYANT = "pagemill", "pagemill, targets", "informed", "clairvoyant"
BOUNDS = (INFORMED, CLAIRVOYANT)
SLO_SHARE = 0.95
"""Share of the requests: if `informed` reaches it, the SLO can be met."""
MOST_OF_INFORMED, MOST_BELOW = 1.15, 0.005
MOST_OF_RIVAL = 1.05
TOLERANCE = 0.005
"""How much lower the clairvoyant's share may be than the best one for a lower cost, as in its search."""
DOLLARS_PER_HOUR = 2.5
"""Price of a replica; it only sets the unit."""


class Point(NamedTuple):
    share: float
    pod_seconds: float
    flaps: int = 0
    refused: int = 0


class Result(NamedTuple):
    """All lines of one cell."""

    kind: str
    load: str
    cold_start_s: float
    seed: int
    points: dict[str, Point]

    @property
    def can_be_met(self) -> bool:
        return INFORMED in self.points and self.points[INFORMED].share >= SLO_SHARE

    def of_informed(self, policy: str = OURS) -> float:
        return self.points[policy].pod_seconds / self.points[INFORMED].pod_seconds

    @property
    def below_informed(self) -> float:
        """Return how much lower Pagemill's share of requests is than that of `informed`."""
        return self.points[INFORMED].share - self.points[OURS].share

    @property
    def cheapest_rival(self) -> Point | None:
        """The cheapest rival that reaches Pagemill's share, or None."""
        rivals = [point for name, point in self.points.items() if name not in (OURS, TARGETS, *BOUNDS)]
        equal = [each for each in rivals if each.share >= self.points[OURS].share]
        return min(equal, key=lambda each: each.pod_seconds, default=None)

    def misses(self) -> list[str]:
        """Return the goals that are missed."""
        ours, found = self.points[OURS], []
        if self.can_be_met and self.of_informed() > MOST_OF_INFORMED:
            found.append(f"{self.of_informed():.2f} times the pod-seconds of informed")
        if self.can_be_met and self.below_informed > MOST_BELOW:
            found.append(f"{100 * self.below_informed:.1f} points below informed")
        rival = self.cheapest_rival
        if rival is not None and ours.pod_seconds > MOST_OF_RIVAL * rival.pod_seconds:
            found.append(f"{ours.pod_seconds / rival.pod_seconds:.2f} times the cheapest rival of that share")
        if ours.flaps and self.kind == "steady":
            found.append(f"{ours.flaps} flaps")
        if ours.refused and not self.points[INFORMED].refused:
            found.append(f"{ours.refused} refused")
        return found


def results_of(lines: Iterable[dict[str, Any]]) -> list[Result]:
    """Return the results; later figures of a policy replace earlier ones.

    A better point of another policy counts as the clairvoyant's own, because its search did not find it.
    """
    figures: dict[tuple[Any, ...], dict[str, Point]] = defaultdict(dict)
    frontiers: dict[tuple[Any, ...], list[tuple[int, float, int]]] = defaultdict(list)
    for line in lines:
        key = tuple(line[name] for name in ("kind", "load", "cold_start_s", "seed"))
        for name, found in line["figures"].items():
            point = Point(found["slo_attained"], found["pod_seconds"], found["num_flaps"], found["num_refused"])
            figures[key][name] = point
        num_requests = next(iter(line["figures"].values()))["num_requests"]
        frontiers[key] += [(missed, cost, num_requests) for missed, cost in line["frontier"]]
    for key, points in figures.items():
        if CLAIRVOYANT in points:
            points[CLAIRVOYANT] = _best(points, frontiers[key])
    return [
        Result(kind, load, cold_start_s, seed, points) for (kind, load, cold_start_s, seed), points in figures.items()
    ]


def _best(points: dict[str, Point], frontier: list[tuple[int, float, int]]) -> Point:
    known = [Point(1 - missed / num_requests, cost) for missed, cost, num_requests in frontier] + list(points.values())
    least = max(each.share for each in known) - TOLERANCE
    best = min((each for each in known if each.share >= least), key=lambda each: each.pod_seconds)
    return points[CLAIRVOYANT] if points[CLAIRVOYANT].pod_seconds <= best.pod_seconds else best


def render(results: Sequence[Result]) -> str:
    """Return a table for each cold start, and the cells that miss a goal."""
    parts = []
    for cold_start_s in sorted({each.cold_start_s for each in results}):
        here = [each for each in results if each.cold_start_s == cold_start_s]
        parts += [f"Starts of {cold_start_s:.0f} s:", "", _table(here), ""]
    parts += [_cells(results), "", _goals(results)]
    return "\n".join(parts)


def _table(results: Sequence[Result]) -> str:
    """Return a row for each kind and load, over all seeds."""
    names = list(dict.fromkeys(name for each in results for name in each.points if name not in BOUNDS))
    columns = ["kind, load", "seeds", "informed", "clairvoyant", *names, "$"]
    rows = []
    for kind, load in dict.fromkeys((each.kind, each.load) for each in results):
        here = [each for each in results if (each.kind, each.load) == (kind, load)]
        seeds = ", ".join(str(each.seed) for each in sorted(here, key=lambda each: each.seed))
        informed = [each.points[INFORMED] for each in here]
        bound = f"{_mean_share(informed)} {fmean(each.pod_seconds for each in informed):,.0f} s"
        cells = [_cell(here, name) for name in (CLAIRVOYANT, *names)]
        dollars = fmean(each.points[OURS].pod_seconds for each in here) / 3600 * DOLLARS_PER_HOUR
        rows.append([f"{kind}, {load}", seeds, bound, *cells, f"{dollars:.2f}"])
    return markdown_table(columns, rows)


def _cell(results: Sequence[Result], name: str) -> str:
    """Return the share within the SLO, the ratio of pod-seconds to `informed`'s, and faults."""
    known = [each for each in results if name in each.points]
    if not known:
        return "-"
    points, ratio = [each.points[name] for each in known], fmean(each.of_informed(name) for each in known)
    marks = [
        f"{sum(values)} {what}" for what in ("flaps", "refused") if sum(values := [getattr(p, what) for p in points])
    ]
    return ", ".join([f"{_mean_share(points)} {ratio:.2f}", *marks])


def _mean_share(points: Iterable[Point]) -> str:
    return f"{100 * fmean(each.share for each in points):.1f}"


def _cells(results: Sequence[Result]) -> str:
    """Return which cells were run."""
    counted: dict[tuple[float, str, int], list[str]] = defaultdict(list)
    for each in results:
        counted[each.cold_start_s, each.load, each.seed].append(each.kind)
    named = [
        f"{load} load, starts of {cold_start_s:.0f} s, seed {seed}: {len(kinds)} kinds"
        for (cold_start_s, load, seed), kinds in sorted(counted.items())
    ]
    return f"Cells: {len(results)} ({'; '.join(named)})."


def _goals(results: Sequence[Result]) -> str:
    missed = [(each, found) for each in results if (found := each.misses())]
    can_be_met = sum(each.can_be_met for each in results)
    lines = [
        f"Of {len(results)} cells, in {can_be_met} of which `informed` keeps the SLO, {len(missed)} miss a goal:",
        "",
    ]
    for each, found in missed:
        lines.append(f"- {each.kind}, {each.load}, {each.cold_start_s:.0f} s, seed {each.seed}: {'; '.join(found)}")
    return "\n".join(lines)
