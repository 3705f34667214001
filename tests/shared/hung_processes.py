"""Processes that a test makes hang with SIGSTOP, and their certain end.

A stopped process notices neither the end of its parent nor SIGTERM: one that a failed test leaves behind stays until it
is killed by hand. Tests call `hang`; `tests/conftest.py` calls `end_hung` after every test.
"""

from __future__ import annotations

from contextlib import suppress

import psutil

_hung: list[psutil.Process] = []


def hang(pid: int) -> None:
    """Stop the process, which may be continued with SIGCONT."""
    process = psutil.Process(pid)
    _hung.append(process)
    process.suspend()


def end_hung() -> None:
    """Kill those that are stopped still."""
    while _hung:
        process = _hung.pop()
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()
