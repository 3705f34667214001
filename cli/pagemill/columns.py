"""Text in aligned columns, never wrapped: it can be searched, cut and read in a log as well as in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

GAP = "  "


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Each row as one line; the first row is usually the head. The last column may be of any length."""
    widths = [max(len(cell) for cell in cells) for cells in zip(*(row[:-1] for row in rows), strict=True)]
    return [
        GAP.join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
