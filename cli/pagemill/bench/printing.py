"""What a person reads: progress while a run lasts, tables of figures and of differences, plots."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pagemill.bench.plots import as_text, charts_of
from pagemill.bench.results import Result
from pagemill.bench.samples import LATENCIES, PERCENTILES, BenchRun, LatencyLimits
from pagemill.bench.sweeping import GOOD_SHARE, Point
from pagemill.columns import columns

if TYPE_CHECKING:
    # numpy's threads, which it starts, would be part of what a measurement costs.
    from pagemill.bench.comparing import Difference

CLEAR = "\r\x1b[K"


class ProgressLine:
    """A line on stderr that is written anew, if that is a terminal."""

    def __init__(self, load: str, num_requests: int) -> None:
        self._load, self._num_requests = load, num_requests

    def __call__(self, run: BenchRun, num_running: int) -> None:
        if not sys.stderr.isatty():
            return
        num_ended = len(run.samples) + len(run.errors)
        failed = f", {len(run.errors)} failed" * bool(run.errors)
        text = f"{self._load}: {num_ended} of {self._num_requests} requests, {num_running} running{failed}"
        sys.stderr.write(f"{CLEAR}{text}" if num_running else CLEAR)
        sys.stderr.flush()


def table_of(result: Result) -> str:
    """Return the figures of one load as a table of latencies, of several as a row for each."""
    reports = [result.report(each) for each in result.measured]
    plots = [line for chart in charts_of(result) for line in ["", *as_text(chart)]]
    return "\n".join([*(_one(reports[0]) if len(reports) == 1 else _several(result, reports)), *plots])


def _one(report: dict[str, Any]) -> list[str]:
    good = []
    if "good_share" in report:
        share = f"{report['good_share']:.1%} of the requests keep the SLO"
        good.append(f"goodput: {report['goodput_requests_per_s']} requests/s, {share}")
    names = ["mean", *(f"p{p}" for p in PERCENTILES)]
    rows = [["ms", *names]]
    for name in LATENCIES:
        values = report[f"{name}_ms"]
        rows.append([name.upper(), *(f"{values[each]:.1f}" if values else "-" for each in names)])
    return [
        f"{report['requests']} requests in {report['wall_s']} s: "
        f"{report['output_tokens_per_s']} output tokens/s, {report['requests_per_s']} requests/s",
        *good,
        *columns(rows),
    ]


def _several(result: Result, reports: Sequence[dict[str, Any]]) -> list[str]:
    head = [
        "LOAD",
        "REQUESTS",
        "FAILED",
        "REQUESTS/S",
        "TOKENS/S",
        "TTFT p50",
        "TTFT p99",
        "ITL p50",
        "ITL p99",
        "GOOD",
    ]
    rows = [head]
    for each, report in zip(result.measured, reports, strict=True):
        latencies = [report[f"{name}_ms"].get(rank) for name in ("ttft", "itl") for rank in ("p50", "p99")]
        rows.append(
            [
                each.load,
                str(report["requests"]),
                str(report["failed"]),
                f"{report['requests_per_s']:g}",
                f"{report['output_tokens_per_s']:g}",
                *("-" if value is None else f"{value:.1f}" for value in latencies),
                f"{report['good_share']:.1%}" if "good_share" in report else "-",
            ]
        )
    return [*columns(rows), "Times in milliseconds."]


def sweep_summary(saturated: Point, good: Point | None, slo: LatencyLimits) -> str:
    text = (
        f"Saturated at {saturated.load.name}: {saturated.run.output_tokens_per_s:.1f} output tokens/s; "
        "more clients only wait longer."
    )
    if slo == LatencyLimits():
        return text
    if good is None:
        return f"{text}\nNo load kept the SLO for {GOOD_SHARE:.0%} of its requests."
    return f"{text}\nThe highest load that kept the SLO for {GOOD_SHARE:.0%} of its requests: {good.load.name}."


def differences_of(found: Sequence[tuple[str, Sequence[Difference]]]) -> str:
    """Return a table of differences for each load."""
    lines = []
    for load, differences in found:
        rows = [["", "BEFORE", "AFTER", "AFTER/BEFORE", "95 % INTERVAL", ""]]
        for each in differences:
            interval = f"{each.low:.3f} to {each.high:.3f}"
            verdict = "differs" if each.is_certain else "no difference shown"
            rows.append([each.name, f"{each.before:.2f}", f"{each.after:.2f}", f"{each.ratio:.3f}", interval, verdict])
        lines += [load, *columns(rows), ""]
    return "\n".join(lines).rstrip()
