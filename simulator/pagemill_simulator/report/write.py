"""Writes the report of simulated fleets: `report.html`, and the plots as PNG if matplotlib is installed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pagemill_simulator.fleet.figures import figures_of
from pagemill_simulator.fleet.outcome import FleetOutcome
from pagemill_simulator.report import page, png
from pagemill_simulator.report.charts import ChartedRun, charts_of

PAGE = "report.html"


def write_report(
    outcomes: Sequence[FleetOutcome], folder: Path, *, slo_ttft_ms: float | None, slo_tpot_ms: float | None
) -> Path:
    """Write the page, and the plots if `png.can_draw`, into a folder that is created if needed; return the page's path.

    Raise `OSError`, or `ValueError` without outcomes.
    """
    if not outcomes:
        raise ValueError("there is no outcome to report: simulate at least one policy")
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for number, (workload, group) in enumerate(_by_workload(outcomes).items()):
        runs = _named(group)
        charts = charts_of(runs, slo_ttft_ms=slo_ttft_ms)
        figures = [figures_of(each, slo_ttft_ms=slo_ttft_ms, slo_tpot_ms=slo_tpot_ms) for each in group]
        sections.append(page.section(number, workload, runs, figures, charts))
        if png.can_draw():
            for chart in charts:
                png.write(chart, folder / f"{number}-{_file_name(workload)}-{chart.name}.png")
    path = folder / PAGE
    is_exact = all(each.is_exact for each in outcomes)
    path.write_text(page.page(sections, slo=_slo(slo_ttft_ms, slo_tpot_ms), is_exact=is_exact), encoding="utf-8")
    return path


def _by_workload(outcomes: Sequence[FleetOutcome]) -> dict[str, list[FleetOutcome]]:
    groups: dict[str, list[FleetOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.workload, []).append(outcome)
    return groups


def _named(outcomes: Sequence[FleetOutcome]) -> list[ChartedRun]:
    """Label the outcomes; a policy that occurs again, with other parameters, is numbered."""
    count: Counter[str] = Counter()
    runs = []
    for hue, outcome in enumerate(outcomes):
        count[outcome.policy] += 1
        again = count[outcome.policy]
        runs.append(ChartedRun(outcome.policy if again == 1 else f"{outcome.policy} ({again})", outcome, hue))
    return runs


def _file_name(workload: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", workload).strip("-")[:40] or "workload"


def _slo(ttft_ms: float | None, tpot_ms: float | None) -> str:
    limits = (("TTFT", ttft_ms), ("TPOT", tpot_ms))
    return " and ".join(f"{name} within {limit:g} ms" for name, limit in limits if limit is not None)
