"""Writes the rows of all runs into docs/benchmarks.md: `make bench-gpu-table`, with ROWS naming files that came back.

`rows.json` beside this keeps every row, of every commit and card. The page shows the newest row of each shape, unit,
peer and card; one that was not measured at the newest commit stays and is marked by its age.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import paths
from rows import Row, newest, read

RECORDED = paths.HERE / "rows.json"
PAGE = paths.ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- rows of bench/gpu/rows.json: make bench-gpu-table -->", "<!-- end of the rows -->"
TINY = "tiny: "
"""Rows of shapes whose times mean nothing."""
HEAD = ("What", "Unit", "Ours", "Limit", "% of it", "Peer", "Its figure", "Times as fast", "Measured")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", type=Path, help="files of rows that a run has written, the oldest first")
    options = parser.parse_args()
    absent = [str(path) for path in options.rows if not path.is_file()]
    if absent:
        raise SystemExit(
            f"bench/gpu/table.py: no file {', '.join(absent)}; name rows.jsonl of a run, such as ROWS=out/rows.jsonl"
        )
    if options.rows:
        record(RECORDED, read([RECORDED, *options.rows]))
    PAGE.write_text(page(PAGE.read_text(), read([RECORDED])))
    return 0


def record(path: Path, rows: Iterable[Row]) -> None:
    """Write the rows, one a line; of equal ones of one commit, code and card, the last."""
    kept = newest(rows, lambda row: (*row.key, row.commit, row.code, row.card))
    path.write_text("[\n" + ",\n".join(json.dumps(row.as_json()) for row in kept) + "\n]\n")


def page(text: str, rows: list[Row]) -> str:
    """Return the page with the table of these rows between its marks."""
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{PAGE.name} has no lines `{BEGIN}` and `{END}`, between which the rows are written")
    return f"{before}{BEGIN}\n\n" + "\n".join(document(rows)) + f"\n{END}{after}"


def document(rows: list[Row]) -> Iterator[str]:
    shown = newest(rows, lambda row: (*row.key, row.card))
    if not shown:
        yield "No row has been recorded yet.\n"
        return
    last = max(rows, key=lambda row: row.date) if rows else rows[-1]
    for about in dict.fromkeys((row.card, row.driver, row.software) for row in shown):
        yield f"On one {about[0]}, driver {about[1]}, {about[2]}.\n"
    for name in dict.fromkeys(row.section for row in shown):
        yield from _section(name, [row for row in shown if row.section == name], _newest_commit(rows), last.date)


def _newest_commit(rows: list[Row]) -> str:
    return rows[-1].commit


def _section(name: str, rows: list[Row], commit: str, date: str) -> Iterator[str]:
    yield f"**{name}**\n"
    small = [row for row in rows if row.shape.startswith(TINY)]
    if small:
        failed = [row.shape.removeprefix(TINY) for row in small if row.error]
        wrong = f"; these do not: {', '.join(failed)}" if failed else ""
        yield f"{len(small) - len(failed)} of {len(small)} kernels on tiny shapes equal their reference{wrong}.\n"
    large = [row for row in rows if not row.shape.startswith(TINY)]
    if not large:
        return
    yield f"| {' | '.join(HEAD)} |"
    yield f"|{'---|' * len(HEAD)}"
    for row in large:
        share = "" if row.share is None or row.unit.startswith("tests") else f"{100 * row.share:.0f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        figures = [_figure(row.ours), _figure(row.limit), share, row.peer_name, _figure(row.peer), ratio]
        cells = [row.shape, row.unit, *figures, age(row, commit, date)]
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"
        if row.error:
            yield f"| {_cell(row.shape)} | failed | {_cell(row.error[:200])} |{' |' * (len(HEAD) - 3)}"
    yield ""


def age(row: Row, commit: str, date: str) -> str:
    """Return the row's commit; one that is not the newest has its age."""
    if row.commit == commit:
        return row.commit
    days = (datetime.date.fromisoformat(date) - datetime.date.fromisoformat(row.date)).days
    return (
        f"{row.commit}, {f'{days} days' if days != 1 else '1 day'} older" if days else f"{row.commit}, earlier that day"
    )


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value >= 100 else f"{value:.3g}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
