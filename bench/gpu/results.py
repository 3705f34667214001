"""The results of a section: tables, as Markdown and as JSON."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from measuring import Device


@dataclass
class Table:
    title: str
    columns: Sequence[str]
    rows: list[list[Any]] = field(default_factory=list)
    changed: Callable[[], None] | None = None

    def add(self, *cells: Any) -> None:
        self.rows.append(list(cells))
        print(f"{self.title}: {', '.join(map(_named, self.columns, cells))}", flush=True)
        if self.changed is not None:
            self.changed()

    def as_json(self) -> dict[str, Any]:
        return {"title": self.title, "columns": list(self.columns), "rows": self.rows}

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *([_show(cell) for cell in row] for row in self.rows)]
        return f"### {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


@dataclass
class Section:
    name: str
    seconds: float = 0.0
    error: str = ""
    """Why the section failed; earlier results stay."""
    tables: list[Table] = field(default_factory=list)
    changed: Callable[[], None] | None = None
    """Called with each row, so that a section that never ends leaves its results."""

    def table(self, title: str, *columns: str) -> Table:
        self.tables.append(Table(title, columns, changed=self.changed))
        return self.tables[-1]

    def as_json(self) -> dict[str, Any]:
        tables = [table.as_json() for table in self.tables]
        return {"name": self.name, "seconds": self.seconds, "error": self.error, "tables": tables}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Section:
        tables = [Table(**table) for table in found["tables"]]
        return cls(found["name"], found["seconds"], found["error"], tables)

    def markdown(self) -> str:
        head = f"## {self.name}, {self.seconds:.0f} s\n"
        error = [f"**Failed**: {self.error}\n"] if self.error else []
        return "\n".join([head, *error, *(table.markdown() for table in self.tables)])


def about(device: Device) -> dict[str, str]:
    """Return what identifies the machine."""
    return {
        "device": device.name,
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
    }


def document(machine: dict[str, str], sections: Iterable[Section]) -> str:
    reported = ", ".join(f"{name} {value}" for name, value in machine.items())
    return "\n".join([f"# GPU benchmarks\n\n{reported}\n", *(section.markdown() for section in sections)])


def reported(problem: Exception, length: int = 120) -> str:
    """Return an exception as one line for a table."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:length]}"


def _named(column: str, cell: Any) -> str:
    return f"{column} {_show(cell)}"


def _show(cell: Any) -> str:
    return f"{cell:,.2f}" if isinstance(cell, float) else " ".join(str(cell).split()).replace("|", "\\|")
