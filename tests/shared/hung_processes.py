"""Processes that a test suspends with SIGSTOP, and their cleanup.

A suspended process notices neither the end of its parent nor SIGTERM, so one that a failed test leaves behind would
stay until it is killed by hand. Tests call `hang`; `tests/conftest.py` calls `end_hung` after every test.
"""

from __future__ import annotations

from contextlib import suppress

import psutil

_hung: list[psutil.Process] = []


def hang(pid: int) -> None:
    """Suspend the process; SIGCONT resumes it."""
    process = psutil.Process(pid)
    _hung.append(process)
    process.suspend()


def end_hung() -> None:
    """Kill the processes that are still suspended."""
    while _hung:
        process = _hung.pop()
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()
