"""Progress of the simulations on a terminal: on stderr, removed at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pagemill.printable import printable


@contextmanager
def progress_of(name: str) -> Iterator[Callable[[float], None] | None]:
    """The function to call with the completed share; `None` without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(printable(name), total=1.0)
        yield lambda share: progress.update(task, completed=share)
