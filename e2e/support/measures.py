"""Measurements of the cases: one JSON line each, printed and stored in a file, and a Markdown table of such a file.

python -m support.measures build/e2e/measures.jsonl      (in e2e/) writes the table for docs/benchmarks.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

Value = float | int | str


@dataclass(frozen=True)
class Measures:
    path: Path

    def record(self, measure: str, **values: Value) -> None:
        """Record a measurement. Names include their unit: `total_s=12.3`."""
        rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in values.items()}
        line = json.dumps({"measure": measure, **rounded})
        print(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as lines:
            lines.write(line + "\n")


def table(lines: Iterable[str]) -> str:
    """Return a table in which the latest line of each measure is one row."""
    latest = {entry.pop("measure"): entry for entry in map(json.loads, lines)}
    rows = [f"| {measure} | {_cells(values)} |" for measure, values in latest.items()]
    return "\n".join(["| measure | values |", "|---|---|", *rows])


def _cells(values: dict[str, Value]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        sys.stdout.write(table(file) + "\n")
