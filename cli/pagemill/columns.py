"""Text in aligned columns. Lines are never wrapped, so that `grep` and `cut` work on the output."""

from __future__ import annotations

from collections.abc import Sequence

GAP = "  "


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return each row as one line. Cells of all columns but the last are padded to the column's width."""
    widths = [max(len(cell) for cell in cells) for cells in zip(*(row[:-1] for row in rows), strict=True)]
    return [
        GAP.join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
