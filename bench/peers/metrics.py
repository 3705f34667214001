"""The figures of the comparison and their goals: which value of which row, and what counts as ahead."""

from __future__ import annotations

from typing import NamedTuple

from report import median

from peers.catalogue import Precision
from peers.results import Results


class Metric(NamedTuple):
    row: str
    key: str
    title: str
    more_is_better: bool
    percentile: int | None = None
    """Percentile over the values of all runs; None: the median of the runs."""
    goal: float | dict[Precision, float] | None = None
    """The smallest ratio to the best peer that meets the goal."""
    most: float | None = None
    """A limit for Pagemill's own figure."""
    against: str = ""
    """Only peers whose names begin with this count for the ratio."""

    def goal_of(self, precision: Precision) -> float | None:
        return self.goal.get(precision) if isinstance(self.goal, dict) else self.goal


def _online(row: str, clients: str) -> list[Metric]:
    found = [Metric(row, "tok_per_s", f"online, {clients}: output tok/s", True)]
    for key, name in (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("tpot_ms", "TPOT")):
        for percentile in (50, 95, 99):
            goal = 1.0 if percentile == 95 and key != "itl_ms" else None
            title = f"online, {clients}: {name} p{percentile}, ms"
            found.append(Metric(row, key, title, False, percentile, goal))
    return found


METRICS = [
    Metric("mixed", "tok_per_s", "64 mixed prompts at once, output tok/s", True, goal=1.5),
    Metric("single", "tok_per_s", "single stream decode, tok/s", True, goal={"float": 1.3, "int8": 1.2, "4-bit": 1.0}),
    Metric("single", "ttft_ms", "first token of 64, ms", False),
    Metric("prefill", "tok_per_s", "prefill of 1,024 tokens, tok/s", True, goal=1.2),
    Metric("prefix", "seconds", "16 requests sharing 768 tokens, s", False, goal=1.3),
    *_online("online-1", "1 client"),
    *_online("online-8", "8 clients"),
    *_online("online-32", "32 clients"),
    Metric("start", "seconds", "process start to ready, s", False, most=4.0),
    Metric("mixed", "peak_mib", "peak memory of the mixed row, MiB", False, goal=1.0, against="openvino"),
]


def figure(results: Results, peer: str, metric: Metric) -> float | None:
    """Return one number, or None if nothing was measured."""
    values = results.values(peer, metric.row, metric.key)
    if not values:
        return None
    if metric.percentile is None:
        return median(values)
    return percentile([value for run in values for value in run], metric.percentile)


def percentile(values: list[float], rank: int) -> float:
    """Return the percentile by nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, -(-rank * len(ordered) // 100) - 1)]


def advantage(metric: Metric, ours: float, best: float) -> float:
    """Return how many times better Pagemill is; below 1 it is behind."""
    return ours / best if metric.more_is_better else best / ours
