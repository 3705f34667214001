"""Starts and ends the cluster's processes, which outlive the command that starts them.

A folder's `pids.json` maps programs to process ids. Process ids are reused, so a process is killed only if its program
is still the file that was started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

STOP_TIMEOUT_S = 10.0


class Started(TypedDict):
    pid: int
    program: str
    """The target of `/proc/PID/exe`."""


def start(state: Path, name: str, argv: list[str], env: Mapping[str, str] | None = None) -> None:
    """Start `argv` in its own session; its output is appended to `name.log` in the folder."""
    with (state / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    program = str(Path(argv[0]).resolve())
    _write(state, {**started(state), name: {"pid": process.pid, "program": program}})


def stop(state: Path, name: str) -> None:
    """Send SIGKILL and wait for the end; the lost state is either discarded or the fault that a test needs."""
    processes = started(state)
    process = processes.pop(name, None)
    if process is None:
        return
    kill(process)
    _write(state, processes)


def kill(process: Started) -> None:
    if is_running(process):
        os.kill(process["pid"], signal.SIGKILL)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while is_running(process) and time.monotonic() < deadline:
        time.sleep(0.02)


def is_running(process: Started) -> bool:
    try:
        return os.readlink(f"/proc/{process['pid']}/exe") == process["program"]
    except OSError:
        return False


def started(state: Path) -> dict[str, Started]:
    """Return the processes that `start` started and `stop` did not stop, oldest first."""
    try:
        processes: dict[str, Started] = json.loads((state / "pids.json").read_text())
    except FileNotFoundError:
        return {}
    return processes


def log_tail(state: Path, name: str) -> str:
    try:
        return (state / f"{name}.log").read_text(errors="replace")[-3000:]
    except FileNotFoundError:
        return ""


def _write(state: Path, processes: dict[str, Started]) -> None:
    partial = state / ".pids.json"
    partial.write_text(json.dumps(processes))
    partial.rename(state / "pids.json")
