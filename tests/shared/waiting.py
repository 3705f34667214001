"""Waits for other tasks, threads or processes; they depend on progress, not on the clock.

A condition is polled until it is true. A wait fails after `WAIT_LIMIT_S` without progress, which is longer than any
step of these tests takes on a busy machine. Only time in which the test polled counts: if this process was delayed
between two polls, others were too. What has a time limit of its own in the code under test is asserted by its outcome,
not by how long a test waited.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_LIMIT_S = 60.0
"""The limit without progress."""
START_LIMIT_S = 180.0
"""The limit for a process that imports torch or starts others that do."""
SOON_S = 20.0
"""The limit for what takes less than a second on an idle machine, where a fault takes a minute or more."""
MOST_PER_LOOK_S = 0.5
"""The maximum that the time between two polls counts."""


async def eventually(
    condition: Callable[[], Any],
    *,
    progress: Callable[[], object] | None = None,
    limit_s: float = WAIT_LIMIT_S,
    every_s: float = 0.01,
) -> Any:
    """Return the first true value of `condition`, which may be a coroutine function.

    `progress` is a value whose every change restarts the limit, for example the number of completed items.
    """
    wait = _Wait(condition, progress, limit_s)
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        wait.looked()
        await asyncio.sleep(every_s)


def wait_until(
    condition: Callable[[], Any],
    *,
    progress: Callable[[], object] | None = None,
    limit_s: float = WAIT_LIMIT_S,
    every_s: float = 0.02,
) -> Any:
    """Wait like `eventually`, without an event loop."""
    wait = _Wait(condition, progress, limit_s)
    while not (found := condition()):
        wait.looked()
        time.sleep(every_s)
    return found


def event_in(log: Path, name: str, process: subprocess.Popen[Any]) -> dict[str, Any]:
    """Wait for the first event of that name in the log of `process`; return it."""

    def look() -> dict[str, Any] | None:
        has_ended = process.poll() is not None
        found = find_event(log, name)
        assert found or not has_ended, f"the process exited before {name}"
        return found

    try:
        found: dict[str, Any] = wait_until(look, progress=lambda: log.stat().st_size, limit_s=START_LIMIT_S)
        return found
    except AssertionError as error:
        raise AssertionError(f"{error}; the log ends with {log.read_text()[-3000:]}") from error


def find_event(log: Path, name: str) -> dict[str, Any] | None:
    """Return the first event of that name in a log that contains JSON lines, or None."""
    for line in log.read_text().splitlines(keepends=True):
        if line.startswith("{") and line.endswith("\n") and (event := json.loads(line)).get("event") == name:
            return dict(event)
    return None


def busy_factor() -> float:
    """Return the load average per core, at least 1: the factor for limits that apply to an idle machine."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


class _Wait:
    def __init__(self, condition: Callable[[], Any], progress: Callable[[], object] | None, limit_s: float) -> None:
        self._condition = condition
        self._progress = progress if progress is not None else lambda: None
        self._limit_s = limit_s
        self._reached = self._progress()
        self._spent_s = 0.0
        self._checked_s = time.monotonic()

    def looked(self) -> None:
        """Count one poll without a result."""
        now, reached = time.monotonic(), self._progress()
        self._spent_s += min(MOST_PER_LOOK_S, now - self._checked_s)
        self._checked_s = now
        if reached != self._reached:
            self._reached, self._spent_s = reached, 0.0
        if self._spent_s > self._limit_s:
            progress = "" if self._reached is None else f"; progress ended at {self._reached!r}"
            text = _text_of(self._condition)
            raise AssertionError(f"{self._limit_s:.0f} s without progress: {text} does not hold{progress}")


def _text_of(condition: Callable[[], Any]) -> str:
    try:
        return " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):
        return repr(condition)
