"""The rows of a run: one for each shape and peer, written to a file as soon as it is known.

A section's rows are lines of `SECTION.jsonl`; `rows.jsonl` beside it has those of all sections, because few files come
back from some machines. A row is identified by section, shape, unit and peer; a later one replaces an earlier one.
`code` says which sources were measured: a row of the same code and card is not measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import paths

FASTER_IS_MORE = ("tokens/s", "requests/s", "GB/s", "TFLOP/s", "tests", "answers alike")
"""Units of which more is better; of all others less is."""
KERNELS = ("kernels/pagemill_kernels",)
EXECUTION = (*KERNELS, "execution/pagemill_execution")
ENGINE = (*EXECUTION, *(f"engine/pagemill_engine/{part}" for part in ("kv", "loop", "scheduler")))
SERVER = (*EXECUTION, "engine/pagemill_engine")
"""The folders whose code a section measures, from kernels alone to all that serves."""
NO_CODE = {"cpu", "native.py", "onednn.py"}
"""Folders and files whose code no device runs."""
ALL = "rows.jsonl"


@dataclass(frozen=True)
class Machine:
    card: str
    driver: str
    software: str
    """Versions of Python, torch and Triton."""
    commit: str = ""
    date: str = ""


@dataclass(frozen=True)
class Row:
    commit: str
    date: str
    card: str
    driver: str
    software: str
    code: str
    """Digest of the sources that were measured."""
    section: str
    shape: str
    unit: str
    ours: float | None
    peer_name: str = ""
    peer: float | None = None
    limit: float | None = None
    """What the device's measured copy bandwidth and matmul rate allow, in the same unit."""
    error: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.section, self.shape, self.unit, self.peer_name

    @property
    def more_is_better(self) -> bool:
        return self.unit.startswith(FASTER_IS_MORE)

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the peer ours is."""
        return self._times(self.ours, self.peer)

    @property
    def share(self) -> float | None:
        """The share of the limit that ours reaches."""
        return self._times(self.ours, self.limit)

    def _times(self, ours: float | None, other: float | None) -> float | None:
        if not ours or not other:
            return None
        return ours / other if self.more_is_better else other / ours

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": None if self.ratio is None else round(self.ratio, 4)}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Row:
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in found.items() if name in names})


@dataclass
class Section:
    """What one section has found: its rows, and why it failed."""

    name: str
    machine: Machine
    code: str = ""
    folder: Path | None = None
    """Where the rows are written; None: nowhere."""
    ever: set[str] = field(default_factory=set)
    """Shapes that any earlier run has measured, of whatever code."""
    before: dict[tuple[str, str, str, str], Row] = field(default_factory=dict)
    """Earlier rows of the same card and code."""
    rows: list[Row] = field(default_factory=list)

    def add(
        self,
        shape: str,
        unit: str,
        ours: float | None,
        *,
        limit: float | None = None,
        peer_name: str = "",
        peer: float | None = None,
        error: str = "",
    ) -> None:
        about = asdict(self.machine)
        figures = {"ours": _rounded(ours), "peer": _rounded(peer), "limit": _rounded(limit)}
        names = {"section": self.name, "shape": shape, "unit": unit, "peer_name": peer_name}
        row = Row.from_json({**about, "code": self.code, **names, **figures, "error": error})
        self.rows.append(row)
        print(text_of(row), flush=True)
        if self.folder is not None:
            append(self.folder, row)

    def has(self, shape: str, unit: str, peer_name: str = "") -> Row | None:
        """Return the row of an earlier run without an error, which need not be measured again."""
        row = self.before.get((self.name, shape, unit, peer_name))
        return row if row is not None and not row.error else None

    def own(self, shape: str, unit: str) -> float | None:
        """Return our own figure of this shape, from this run or an earlier one."""
        found = [row for row in [*self.before.values(), *self.rows] if (row.shape, row.unit) == (shape, unit)]
        return next((row.ours for row in reversed(found) if row.section == self.name and row.ours), None)


def text_of(row: Row) -> str:
    parts = [f"{row.section}: {row.shape}: {'-' if row.ours is None else f'{row.ours:,.4g}'} {row.unit}"]
    if row.share is not None:
        parts.append(f"{100 * row.share:.0f} % of the limit")
    if row.peer_name:
        parts.append(f"{row.peer_name} {'-' if row.peer is None else f'{row.peer:,.4g}'}")
    if row.ratio is not None:
        parts.append(f"{row.ratio:.2f} times as fast")
    return ", ".join([*parts, row.error] if row.error else parts)


def append(folder: Path, row: Row) -> None:
    """Write a row to its section's file and to that of all rows; each is closed, so that nothing is lost."""
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps(row.as_json()) + "\n"
    for name in (f"{row.section}.jsonl", ALL):
        with (folder / name).open("a") as file:
            file.write(line)


def read(files: Iterable[Path]) -> list[Row]:
    """Read files of lines or of a JSON list, the oldest first; a line that was cut short is left out."""
    return [row for path in files if path.exists() for row in _read(path)]


def _read(path: Path) -> Iterator[Row]:
    if path.suffix == ".json":
        yield from map(Row.from_json, json.loads(path.read_text()))
        return
    for line in path.read_text().splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        yield Row.from_json(found)


def newest(rows: Iterable[Row], same: Callable[[Row], object] = lambda row: row.key) -> list[Row]:
    """Return the last row of each key, in the order in which the keys first appear.

    A row of ours alone is left out where a row of the same commit shows the same figure beside a peer.
    """
    found: dict[object, Row] = {}
    for row in rows:
        found[same(row)] = row
    beside = {(row.commit, *row.key[:3]) for row in found.values() if row.peer_name and row.ours is not None}
    return [row for row in found.values() if row.peer_name or (row.commit, *row.key[:3]) not in beside]


@cache
def code_of(folders: tuple[str, ...]) -> str:
    """Return a digest of the Python sources in these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((paths.ROOT / folder).rglob("*.py")):
            if NO_CODE.isdisjoint(path.relative_to(paths.ROOT).parts):
                digest.update(f"{path.relative_to(paths.ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
