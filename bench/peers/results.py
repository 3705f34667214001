"""The measurements: one sample for each run of a row by a peer, and every reason why there is none.

Results of several commands can be merged, so that a long comparison can be measured in parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Sample:
    peer: str
    row: str
    run: int
    values: dict[str, Any]
    """Numbers by key; lists of milliseconds if percentiles are needed."""


@dataclass
class Problem:
    peer: str
    row: str
    cause: str


@dataclass
class Results:
    machine: dict[str, Any]
    quick: bool
    samples: list[Sample] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Facts that each peer reported about itself."""

    def values(self, peer: str, row: str, key: str) -> list[Any]:
        """Return the values of every run that has the key."""
        return [s.values[key] for s in self.samples if (s.peer, s.row) == (peer, row) and key in s.values]

    def cause(self, peer: str, row: str) -> str | None:
        """Return why the peer has no figure in this row; None if nothing failed or a later run succeeded."""
        if any((sample.peer, sample.row) == (peer, row) for sample in self.samples):
            return None
        causes = [problem.cause for problem in self.problems if (problem.peer, problem.row) == (peer, row)]
        return causes[-1] if causes else None

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))


def load(path: Path) -> Results:
    raw = json.loads(path.read_text())
    return Results(
        raw["machine"],
        raw["quick"],
        [Sample(**each) for each in raw["samples"]],
        [Problem(**each) for each in raw["problems"]],
        raw["about"],
    )


def merge(several: Iterable[Results]) -> Results:
    """Merge the parts of a comparison on one machine; a run measured twice counts twice."""
    pieces = list(several)
    first = pieces[0]
    for piece in pieces[1:]:
        same = all(piece.machine[key] == first.machine[key] for key in ("cpu", "cores"))
        if not same or piece.quick != first.quick:
            raise ValueError("results of different machines or sizes cannot be merged; render them separately")
    return Results(
        first.machine,
        first.quick,
        [sample for piece in pieces for sample in piece.samples],
        [problem for piece in pieces for problem in piece.problems],
        {name: facts for piece in pieces for name, facts in piece.about.items()},
    )
