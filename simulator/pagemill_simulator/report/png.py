"""The charts as PNG pictures by matplotlib, an optional dependency of this package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagemill_simulator.report.charts import Chart
from pagemill_simulator.report.svg import dashes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0b5cad", "#b34700", "#00735a", "#a3367c", "#8a6100", "#4b3fb5", "#5b5b66", "#006b8f", "#7a1f1f")
"""The page's colours on white."""
INCHES = (7.2, 4.2)
DPI = 150
REMEDY = "for the plots as PNG install matplotlib: pip install 'pagemill[png]'"


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def write(chart: Chart, path: Path) -> None:
    # pyplot is avoided: it keeps figures and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _fill(axes, chart)
    figure.savefig(path, format="png", metadata={"Software": None, "Title": chart.title})


def _fill(axes: Axes, chart: Chart) -> None:
    for line in chart.lines:
        xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
        axes.plot(
            xs,
            ys,
            label=line.label,
            color=COLOURS[line.hue % len(COLOURS)],
            alpha=0.7 if line.is_faint else 1.0,
            **_style(dashes_of(line), line.is_step),
        )
    for mark in chart.marks:
        draw = axes.axvline if mark.is_upright else axes.axhline
        draw(mark.value, color="#b00020", linewidth=1, linestyle="--", label=mark.label)
    if chart.is_x_log and _has_positive(chart, 0):
        axes.set_xscale("log")
    if chart.is_y_log and _has_positive(chart, 1):
        axes.set_yscale("log")
    elif not chart.is_y_log:
        axes.set_ylim(bottom=0)
    if chart.x_end is not None:
        axes.set_xlim(0, chart.x_end)
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(color="#d9d9e0")
    if len(chart.lines) > 1:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _style(dashes: str, is_step: bool) -> dict[str, Any]:
    style: dict[str, Any] = {"drawstyle": "steps-post"} if is_step else {}
    if dashes:
        style["dashes"] = list(_lengths(dashes))
    return style


def _lengths(dashes: str) -> Iterator[float]:
    """Yield the lengths of dashes and gaps in multiples of the line width."""
    return (float(length) / 2 for length in dashes.split())


def _has_positive(chart: Chart, place: int) -> bool:
    return any(point[place] > 0 for line in chart.lines for point in line.points)
