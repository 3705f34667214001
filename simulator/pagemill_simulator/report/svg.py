"""Draws charts as SVG with the page's colours, so that it works on light and dark pages.

Lines differ in colour and in dashes; each drawing has a description of its content.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from pagemill_simulator.report.axis import Axis, axis_of, shown
from pagemill_simulator.report.charts import Chart, ChartLine, Mark, Point

WIDTH = 480
HEIGHT = 280
LEFT, RIGHT, TOP, BOTTOM = 58, 24, 12, 46
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "12 4", "1 4", "12 3 2 3 2 3", "5 2 1 2")
HUES = 9
"""Number of colours that the page defines; dashes distinguish more lines."""


def drawing_style() -> str:
    """Return the colours of drawings, for light and dark pages, as CSS."""
    return files(__package__).joinpath("drawing.css").read_text(encoding="utf-8")


def draw(chart: Chart, ident: str) -> str:
    """Return the drawing of a chart; `ident` must be unique on the page."""
    points = [point for line in chart.lines for point in line.points]
    across = [x for x, _ in points] + _marked(chart.marks, is_upright=True)
    x_axis = axis_of(across, is_log=chart.is_x_log, end=chart.x_end)
    y_axis = axis_of([y for _, y in points] + _marked(chart.marks, is_upright=False), is_log=chart.is_y_log)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{ident}-title {ident}-about">',
        f'<title id="{ident}-title">{escape(chart.title)}</title>',
        f'<desc id="{ident}-about">{escape(chart.about)}</desc>',
        *_grid(x_axis, y_axis),
        *(_mark(mark, x_axis, y_axis) for mark in chart.marks),
        *(_path(line, x_axis, y_axis) for line in chart.lines if line.points),
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(chart.x_label)}</text>",
        f'<text class="axis" transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2:g}) rotate(-90)" '
        f'text-anchor="middle">{escape(chart.y_label)}</text>',
        "</svg>",
    ]
    return "\n".join(parts)


def legend(lines: Sequence[ChartLine]) -> str:
    """Return the legend beside the drawing, in the page's font size."""
    entries = (
        f'<li><svg class="swatch" viewBox="0 0 36 10" aria-hidden="true">'
        f'<path class="{_classes(line)}"{_dashes(line)} d="M0 5H36"/></svg>{escape(line.label)}</li>'
        for line in lines
    )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _marked(marks: Sequence[Mark], *, is_upright: bool) -> list[float]:
    return [mark.value for mark in marks if mark.is_upright is is_upright]


def _x(axis: Axis, value: float) -> float:
    return round(LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT), 1)


def _y(axis: Axis, value: float) -> float:
    return round(HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM), 1)


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    parts = []
    for tick in y_axis.ticks:
        y = _y(y_axis, tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:g}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:g}" text-anchor="end">{shown(tick)}</text>')
    for tick in x_axis.ticks:
        x = _x(x_axis, tick)
        parts.append(f'<path class="grid" d="M{x:g} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x:g}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{shown(tick)}</text>')
    return parts


def _mark(mark: Mark, x_axis: Axis, y_axis: Axis) -> str:
    if mark.is_upright:
        x = _x(x_axis, mark.value)
        line, place = f"M{x:g} {TOP}V{HEIGHT - BOTTOM}", f'x="{x + 4:g}" y="{HEIGHT - BOTTOM - 6}"'
    else:
        y = _y(y_axis, mark.value)
        line, place = f"M{LEFT} {y:g}H{WIDTH - RIGHT}", f'x="{LEFT + 4}" y="{y - 4:g}"'
    return f'<path class="mark" d="{line}"/><text class="mark-label" {place}>{escape(mark.label)}</text>'


def _path(line: ChartLine, x_axis: Axis, y_axis: Axis) -> str:
    points = [(_x(x_axis, x), _y(y_axis, y)) for x, y in line.points]
    course = _stairs(points) if line.is_step else "L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path class="{_classes(line)}"{_dashes(line)} d="M{course}"/>'


def _stairs(points: Sequence[Point]) -> str:
    (x, y), *rest = points
    return f"{x:g} {y:g}" + "".join(f"H{x:g}V{y:g}" for x, y in rest)


def dashes_of(line: ChartLine) -> str:
    """Return the lengths of dashes and gaps; empty for a solid line."""
    if line.is_faint:
        return "3 3"
    return "" if line.is_solid else DASHES[line.hue % len(DASHES)]


def _classes(line: ChartLine) -> str:
    return f"line hue-{line.hue % HUES}{' faint' * line.is_faint}"


def _dashes(line: ChartLine) -> str:
    dashes = dashes_of(line)
    return f' stroke-dasharray="{dashes}"' if dashes else ""
