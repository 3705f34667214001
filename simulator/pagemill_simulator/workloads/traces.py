"""Recorded workloads: trace files, whose kind the first line determines (`trace_lines.py`).

Without a trace, `generators.py` draws requests of the same lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from pagemill_simulator.workloads.request import SimRequest, Workload
from pagemill_simulator.workloads.trace_lines import KNOWN, Broken, TraceKind, TraceRow, recognize

LONGEST_LINE = 1_000_000
"""Characters; the rest counts as another line."""


class TraceError(ValueError):
    """A trace that cannot be read; the message names file, line and remedy."""


@dataclass(slots=True)
class _Reading:
    """The lines that were read so far."""

    rows: list[TraceRow] = field(default_factory=list)
    num_unanswered: int = 0
    num_broken: int = 0
    first_broken: str = ""


def read_trace(path: Path, *, limit: int | None = None, speedup: float = 1.0, skip_broken: bool = False) -> Workload:
    """Return the first `limit` answered requests; `speedup` divides the gaps between arrivals. Raise `TraceError`.

    A broken line is an error unless `skip_broken` is set: then `source` of the workload has the number of skipped
    lines.
    """
    if limit is not None and limit < 1:
        raise TraceError(f"limit: {limit} requests are no workload; give 1 or more")
    if not 0 < speedup < math.inf:
        raise TraceError(f"speedup: {speedup:g} will not do; give a number above 0")
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            kind, reading = _read(iter(lambda: file.readline(LONGEST_LINE), ""), path, limit, skip_broken)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    if not reading.rows:
        also = f"; {reading.num_broken} lines are broken, the first is {reading.first_broken}" * bool(
            reading.num_broken
        )
        raise TraceError(f"{path}: holds no request that was answered{also}")
    requests = _requests(reading.rows, limit, speedup)
    return Workload(
        name=path.stem,
        source=_source(path, kind, reading, len(requests), speedup),
        requests=requests,
        duration_s=requests[-1].arrival_s,
    )


def _read(lines: Iterable[str], path: Path, limit: int | None, skip_broken: bool) -> tuple[TraceKind, _Reading]:
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    number, first = next(numbered, (0, ""))
    if not first:
        raise TraceError(f"{path}: holds no request; expected {KNOWN}")
    kind = recognize(first.strip())
    if kind is None:
        raise TraceError(f"{path}:{number}: no trace of a known kind: expected {KNOWN}; got {first.strip()[:80]!r}")
    reading = _Reading()
    rest = numbered if kind.has_header else chain([(number, first)], numbered)
    for number, line in rest:
        if kind.is_in_order and limit is not None and len(reading.rows) >= limit:
            break
        try:
            _take(kind.parse(line.strip()), reading)
        except Broken as expected:
            if not skip_broken:
                raise TraceError(
                    f"{path}:{number}: {expected}; mend or remove the line, or leave such lines out with --skip-broken"
                ) from None
            reading.num_broken += 1
            reading.first_broken = reading.first_broken or f"line {number}: {expected}"
    return kind, reading


def _take(row: TraceRow | None, reading: _Reading) -> None:
    if row is None:
        return
    if row.num_prompt_tokens and row.num_output_tokens:
        reading.rows.append(row)
    else:
        reading.num_unanswered += 1


def _requests(rows: list[TraceRow], limit: int | None, speedup: float) -> list[SimRequest]:
    rows.sort(key=lambda row: row.at_s)
    sessions: dict[str, int] = {}
    return [
        SimRequest(
            (row.at_s - rows[0].at_s) / speedup,
            row.num_prompt_tokens,
            row.num_output_tokens,
            None if row.session is None else sessions.setdefault(row.session, len(sessions)),
        )
        for row in rows[:limit]
    ]


def _source(path: Path, kind: TraceKind, reading: _Reading, count: int, speedup: float) -> str:
    parts = [f"{path}: {kind.name}, {count:,} requests"]
    if speedup != 1.0:
        parts.append(f"gaps divided by {speedup:g}")
    if reading.num_unanswered:
        parts.append(f"{reading.num_unanswered:,} without an answer left out")
    if reading.num_broken:
        parts.append(f"{reading.num_broken:,} broken lines left out, the first {reading.first_broken}")
    return "; ".join(parts)
