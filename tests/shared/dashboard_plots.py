"""Draws a Grafana dashboard of the chart from a Prometheus: its panels in their places, by the page's plot library.

Grafana itself is in no package registry. Lines without data or at zero throughout, and panels and rows that then have
none, are left out, so that a picture shows what happened in the recorded run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from prometheus import Prometheus

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).with_suffix(".html")
DASHBOARDS = ROOT / "charts" / "pagemill" / "files" / "dashboards"
VENDOR = ROOT / "gateway" / "pagemill_gateway" / "ui" / "static" / "vendor" / "uplot"
STEP_S = 5
VARIABLES = {"$__rate_interval": "30s", "$job": ".+", "$instance": ".+", "$model": ".+"}
COLUMNS = 3
MOST_LINES = 8


class Recorded(NamedTuple):
    """A Prometheus, and the seconds of its data that are shown."""

    server: Prometheus
    start_s: float
    end_s: float


def drawn_rows(dashboard: dict[str, Any], recorded: Recorded) -> list[dict[str, Any]]:
    """Return the rows that have data, each with its title and its panels with data."""
    rows: list[dict[str, Any]] = []
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            rows.append({"title": panel["title"], "panels": []})
        elif (found := _panel(panel, recorded)) is not None:
            rows[-1]["panels"].append(found)
    return [row for row in rows if row["panels"]]


def expression_of(text: str) -> str:
    """Return a panel's expression for all jobs, instances and models."""
    return re.sub(r"\$\w+", lambda found: VARIABLES[found[0]], text)


def name_of(template: str, labels: dict[str, str]) -> str:
    """Return a series' name in the legend, or its labels if the panel names none."""
    if not template:
        return ", ".join(value for name, value in labels.items() if name != "__name__")
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), template).strip()


def is_known(value: float | None) -> bool:
    return value is not None


def _panel(panel: dict[str, Any], recorded: Recorded) -> dict[str, Any] | None:
    defaults, is_stat = panel["fieldConfig"]["defaults"], panel["type"] == "stat"
    times = [recorded.start_s + STEP_S * number for number in range(int(recorded.end_s - recorded.start_s) // STEP_S)]
    names, lines = [], []
    for target in panel["targets"]:
        for series in _series(recorded, expression_of(target["expr"])):
            values = {round(float(at)): float(value) for at, value in series["values"]}
            line = [values.get(round(at)) for at in times]
            line = [None if value is None or value != value else value for value in line]
            if any(map(is_known, line)) and (is_stat or any(line)):
                names.append(name_of(target.get("legendFormat", ""), series["metric"]))
                lines.append(line)
    if not lines:
        return None
    return {
        "title": panel["title"],
        "unit": defaults.get("unit"),
        "most": defaults.get("max"),
        "stat": next(filter(is_known, reversed(lines[0])), None) if is_stat else None,
        "times": times,
        "names": names[:MOST_LINES],
        "lines": lines[:MOST_LINES],
    }


def _series(recorded: Recorded, expression: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = recorded.server.get(
        "query_range",
        query=expression,
        start=str(recorded.start_s),
        end=str(recorded.end_s),
        step=str(STEP_S),
    )["result"]
    return found


async def draw(page: Any, name: str, recorded: Recorded, path: Path) -> int:
    """Write the picture of a dashboard, and return the number of panels that have data; of none, no picture."""
    dashboard = json.loads((DASHBOARDS / f"{name}.json").read_text())
    rows = drawn_rows(dashboard, recorded)
    if rows:
        await page.set_content(PAGE.read_text())
        await page.add_style_tag(content=(VENDOR / "uPlot.min.css").read_text())
        await page.add_script_tag(content=(VENDOR / "uPlot.iife.min.js").read_text())
        await page.evaluate("drawDashboard", [dashboard["title"], rows])
        await page.screenshot(path=path, full_page=True)
    return sum(len(row["panels"]) for row in rows)
