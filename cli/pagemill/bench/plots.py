"""Plots of a measurement, as an SVG file and as text in the terminal.

The simulator's charts draw the lines; here is which lines, and the drawing in characters.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.bench.results import Measured, Result
from pagemill.bench.samples import VALUES
from pagemill_simulator.report.axis import Axis, axis_of, shown
from pagemill_simulator.report.charts import Chart, ChartLine, Mark, nearest_rank
from pagemill_simulator.report.svg import HEIGHT, WIDTH, draw, drawing_style

COLUMNS, ROWS = 60, 12
"""Size of a plot in the terminal, in characters; each has 2 by 4 dots."""
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a Braille character's dots, from the top (Unicode 2800)."""
SHOWN = {"ttft": "time to first token", "itl": "time between tokens", "e2e": "whole answer"}


def charts_of(result: Result) -> list[Chart]:
    """Return the shares of latencies for one load; for several, latency and throughput over the load."""
    if len(result.measured) == 1:
        return [_shares(result.measured[0], result)]
    return [
        chart
        for name, group in (
            ("clients", [each for each in result.measured if each.concurrency is not None]),
            ("requests per second", [each for each in result.measured if each.concurrency is None]),
        )
        if len(group) > 1
        for chart in _over_load(name, group, result)
    ]


def _shares(each: Measured, result: Result) -> Chart:
    lines = []
    for hue, (name, label) in enumerate(SHOWN.items()):
        values = sorted(value for sample in each.run.samples for value in VALUES[name](sample))
        points = [(nearest_rank(values, percent / 100), percent / 100) for percent in range(1, 101)] if values else []
        lines.append(ChartLine(label, points, hue, is_step=True))
    marks = [Mark(f"SLO of TTFT: {result.slo.ttft:g} s", result.slo.ttft, is_upright=True)] if result.slo.ttft else []
    about = f"Shares of the latencies of {len(each.run.samples)} requests of {result.model}, {each.load}."
    return Chart("latencies", "Shares of latencies", about, "seconds", "share", lines, is_x_log=True, marks=marks)


def _over_load(unit: str, group: Sequence[Measured], result: Result) -> list[Chart]:
    loads = [float(each.concurrency or each.rate_per_s or 0.0) for each in group]
    reports = [result.report(each) for each in group]
    is_log = unit == "clients"
    latencies = [
        ChartLine(
            f"{name.upper()} {percentile}",
            [
                (load, report[f"{name}_ms"][percentile])
                for load, report in zip(loads, reports, strict=True)
                if report[f"{name}_ms"]
            ],
            hue,
        )
        for hue, (name, percentile) in enumerate((("ttft", "p50"), ("ttft", "p99"), ("itl", "p50"), ("itl", "p99")))
    ]
    rates = [(load, report["output_tokens_per_s"]) for load, report in zip(loads, reports, strict=True)]
    most = max(value for _, value in rates)
    return [
        Chart(
            f"throughput-{unit[:7]}",
            f"Throughput by {unit}",
            f"Output tokens per second of {result.model} by {unit}: at most {most:g}.",
            unit,
            "output tokens/s",
            [ChartLine("output tokens/s", rates, 0, is_solid=True)],
            is_x_log=is_log,
        ),
        Chart(
            f"latency-{unit[:7]}",
            f"Latency by {unit}",
            f"Percentiles of latency of {result.model} by {unit}.",
            unit,
            "ms",
            latencies,
            is_x_log=is_log,
            is_y_log=True,
        ),
    ]


def as_svg(charts: Sequence[Chart]) -> str:
    """Return one picture with the charts below each other; it follows the viewer's light or dark colours."""
    row = HEIGHT + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {row * len(charts)}" width="{2 * WIDTH}">',
        f"<style>{drawing_style()}</style>",
        '<rect width="100%" height="100%" style="fill: var(--page)"/>',
    ]
    for number, chart in enumerate(charts):
        drawn = draw(chart, f"chart-{number}").replace("<svg ", f'<svg y="{row * number + 30}" height="{HEIGHT}" ', 1)
        parts.append(f'<text x="8" y="{row * number + 20}" style="fill: var(--ink)">{chart.title}</text>')
        parts.append(drawn)
        parts += _legend(chart, row * number + 30 + HEIGHT + 14)
    return "\n".join([*parts, "</svg>", ""])


def _legend(chart: Chart, y: int) -> list[str]:
    width = WIDTH // max(1, len(chart.lines))
    return [
        f'<path class="line hue-{line.hue}" d="M{8 + at * width} {y - 4}h18"/>'
        f'<text x="{30 + at * width}" y="{y}" style="font-size: 11px; fill: var(--dim)">{line.label}</text>'
        for at, line in enumerate(chart.lines)
    ]


def as_text(chart: Chart) -> list[str]:
    """Return a chart drawn with Braille characters; its title names the lines."""
    points = [point for line in chart.lines for point in line.points]
    x_axis = axis_of([x for x, _ in points], is_log=chart.is_x_log)
    y_axis = axis_of([y for _, y in points], is_log=chart.is_y_log)
    cells = [[0] * COLUMNS for _ in range(ROWS)]
    for line in chart.lines:
        for (x, y), (to_x, to_y) in zip(line.points, line.points[1:] or line.points, strict=False):
            _line(cells, _dot(x_axis, y_axis, x, y), _dot(x_axis, y_axis, to_x, to_y))
    rows = ["".join(chr(0x2800 + cell) for cell in row) for row in cells]
    high, low = shown(y_axis.high), shown(y_axis.low)
    width = max(len(high), len(low))
    edges = [high, *[""] * (ROWS - 2), low]
    lines = [f"{edge:>{width}} |{row}" for edge, row in zip(edges, rows, strict=True)]
    end = shown(x_axis.high)
    scale = f"{shown(x_axis.low)}{chart.x_label:^{COLUMNS - len(shown(x_axis.low)) - len(end)}}{end}"
    names = ", ".join(line.label for line in chart.lines)
    return [f"{chart.title} ({chart.y_label}): {names}", *lines, " " * (width + 2) + scale]


def _dot(x_axis: Axis, y_axis: Axis, x: float, y: float) -> tuple[int, int]:
    return round(x_axis.place(x) * (2 * COLUMNS - 1)), round((1 - y_axis.place(y)) * (4 * ROWS - 1))


def _line(cells: list[list[int]], start: tuple[int, int], end: tuple[int, int]) -> None:
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for step in range(steps + 1):
        x, y = (round(a + (b - a) * step / steps) for a, b in zip(start, end, strict=True))
        cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
