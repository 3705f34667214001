"""Draws the sequence diagrams of the pages as SVG while the site is built, so that it needs no script from outside.

The pages have them as Mermaid's `sequenceDiagram`, which repositories' web pages draw themselves. Understood are
participants, messages, `Note over` and `%%` comments; another line in such a diagram is refused. Diagrams of other
kinds stay text. `hooks` replaces the blocks.
"""

from __future__ import annotations

import re
from html import escape
from typing import NamedTuple

BLOCK = re.compile(r"(?ms)^```mermaid\n(?P<text>sequenceDiagram\n.*?)^```$")
PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
MESSAGE = re.compile(r"(\w+)(-->>|->>)(\w+): (.+)")
NOTE = re.compile(r"Note over (\w+)(?:,(\w+))?: (.+)")
MARGIN, NARROWEST, ROW, HEAD, CHARACTER = 12, 150, 40, 46, 6.6
"""Pixels; a character is one of the text's font at 12 px, about."""


class DiagramError(ValueError):
    """A line that is not understood; the message names it."""


class Line(NamedTuple):
    kind: str
    """`->>`, `-->>` or `note`."""
    start: int
    end: int
    text: str


class Diagram(NamedTuple):
    participants: list[str]
    lines: list[Line]


def drawn(markdown: str) -> str:
    """Return a page's text with its diagrams as inline SVG."""
    return BLOCK.sub(lambda found: svg(read(found["text"])), markdown)


def read(text: str) -> Diagram:
    """Read a diagram. Raises `DiagramError`."""
    first, *rest = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("%%")]
    if first != "sequenceDiagram":
        raise DiagramError(f"a diagram begins with `sequenceDiagram`, not `{first}`")
    names: dict[str, str] = {}
    lines = []

    def place(name: str) -> int:
        if name not in names:
            raise DiagramError(f"`{name}` is no participant; declare it: participant {name} as ...")
        return list(names).index(name)

    for line in rest:
        if found := PARTICIPANT.fullmatch(line):
            names[found[1]] = found[2]
        elif found := MESSAGE.fullmatch(line):
            lines.append(Line(found[2], place(found[1]), place(found[3]), found[4]))
        elif found := NOTE.fullmatch(line):
            lines.append(Line("note", place(found[1]), place(found[2] or found[1]), found[3]))
        else:
            raise DiagramError(f"cannot draw `{line}`; known are participant, ->>, -->> and Note over")
    return Diagram(list(names.values()), lines)


def svg(diagram: Diagram) -> str:
    """Return the diagram without blank lines, which would end a block of HTML in Markdown."""
    lane = _lane(diagram)
    width = 2 * MARGIN + lane * len(diagram.participants)
    height = HEAD + ROW * (len(diagram.lines) + 1)
    title = " → ".join(diagram.participants)
    parts = [
        f'<svg class="sequence" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'width="{width}" style="max-width: 100%; height: auto" font-family="sans-serif" font-size="12" '
        'fill="currentColor" stroke="none">',
        f"<title>{escape(title)}: {escape('; '.join(line.text for line in diagram.lines))}</title>",
        '<defs><marker id="sequence-tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="currentColor"/></marker></defs>',
    ]
    for number, name in enumerate(diagram.participants):
        x = _middle(number, lane)
        parts.append(
            f'<line x1="{x}" y1="{HEAD - 10}" x2="{x}" y2="{height}" stroke="currentColor" stroke-opacity="0.3"/>'
        )
        parts.append(_text(x, 22, name, weight="bold"))
    for number, line in enumerate(diagram.lines):
        parts += _drawn_line(line, HEAD + ROW * (number + 1), lane, len(diagram.participants) - 1)
    return "\n".join([*parts, "</svg>"])


def _lane(diagram: Diagram) -> int:
    """Return the width of a participant's lane, in which every text between neighbours fits."""
    texts = [len(line.text) for line in diagram.lines if abs(line.start - line.end) == 1 and line.kind != "note"]
    return max(NARROWEST, round(max(texts, default=0) * CHARACTER) + 2 * MARGIN)


def _middle(number: int, lane: int) -> int:
    return MARGIN + lane * number + lane // 2


def _drawn_line(line: Line, y: int, lane: int, last: int) -> list[str]:
    start, end = _middle(line.start, lane), _middle(line.end, lane)
    if line.kind == "note":
        middle = (start + end) / 2
        half = max(abs(end - start) / 2 + NARROWEST / 2 - MARGIN, len(line.text) * CHARACTER / 2 + 6)
        box = f'<rect x="{middle - half:.0f}" y="{y - 22}" width="{2 * half:.0f}" height="24" rx="3"'
        return [f'{box} fill="currentColor" fill-opacity="0.08"/>', _text(middle, y - 6, line.text)]
    dashes = ' stroke-dasharray="5 4"' if line.kind == "-->>" else ""
    style = f'fill="none" stroke="currentColor" marker-end="url(#sequence-tip)"{dashes}'
    if start == end:
        path = f"M{start} {y - 12}h40v14H{start}"
        x, anchor = (start - 6, "end") if line.start == last else (start + 46, "start")
        return [f'<path d="{path}" {style}/>', _text(x, y, line.text, anchor=anchor)]
    return [f'<path d="M{start} {y}H{end}" {style}/>', _text((start + end) / 2, y - 6, line.text)]


def _text(x: float, y: float, text: str, *, anchor: str = "middle", weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
