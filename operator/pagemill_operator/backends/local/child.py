"""One child process in a session of its own: it is started and ended here, and its exit is explained.

A child never outlives this process: Linux kills it when its parent ends (prctl(2)), and `end` kills the rest of its
session. Only own children are ever signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
MAX_TAIL_BYTES = 16 * 1024
MAX_LOG_BYTES = 8 * 1024 * 1024
"""Longest log in bytes; as much of the earlier log is kept. The private folder may be in memory, and a gateway writes
a line per request.
"""

NUM_LINES_QUOTED, MAX_LINE_CHARS = 3, 300
"""Lines, and characters per line, quoted from the log of a process that ended without a termination message."""


@dataclass(frozen=True)
class Exit:
    """Why a child ended."""

    reason: str
    """CamelCase reason, from the child's termination message if there is one."""
    message: str
    is_permanent: bool = False
    """Whether the child said that another start would end the same way."""


class Child:
    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path
        self._session_ended = False
        self.pid = process.pid

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> Child:
        """Start a command; its output goes to a fresh log file, and the earlier log is kept beside it."""
        _rotate_log(log_path)
        descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=dict(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
                preexec_fn=_kill_with_parent(),
            )
        finally:
            os.close(descriptor)
        return cls(process, log_path)

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> Exit:
        """Wait until the child ends, by itself or by `end`; return why."""
        returncode = await self._process.wait()
        self._kill_session()
        return explain_exit(returncode, self._log_path)

    async def end(self, timeout_s: float) -> None:
        """Send SIGTERM, wait at most `timeout_s` seconds, and then kill the child and everything it started."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout_s)
        self._kill_session()
        await self._process.wait()

    def kill(self) -> None:
        """Send SIGKILL to the child and everything it started."""
        self._kill_session()

    def bound_log(self, max_bytes: int = MAX_LOG_BYTES) -> None:
        """Copy the log aside and truncate it if it is longer than `max_bytes`. Call this regularly; the file stays
        open.
        """
        with contextlib.suppress(OSError):
            if self._log_path.stat().st_size > max_bytes:
                shutil.copy(self._log_path, older(self._log_path))
                os.truncate(self._log_path, 0)

    def _kill_session(self) -> None:
        # The session's group has the child's pid, which the kernel reserves while a member lives. Afterwards another
        # process
        # may get the number, so the group is signalled only once, right at the child's end.
        if self._session_ended:
            return
        self._session_ended = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def explain_exit(returncode: int, log_path: Path) -> Exit:
    """Return the termination message of a process (a JSON line), or else its exit status and last lines."""
    lines = tail(log_path)
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            message = json.loads(line)
            return Exit(str(message["reason"]), str(message["message"]), message.get("permanent") is True)
    last = f": {' | '.join(_log_message(line)[:MAX_LINE_CHARS] for line in lines[-NUM_LINES_QUOTED:])}" if lines else ""
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = " (the machine may be out of memory)" if name == "SIGKILL" else ""
        return Exit("Killed", f"ended by {name}{hint}{last}")
    return Exit("Crashed", f"ended with exit code {returncode}{last}")


def older(log_path: Path) -> Path:
    """Return the path of the earlier part of a log."""
    return log_path.with_name(f"{log_path.name}.1")


def _rotate_log(log_path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        log_path.rename(older(log_path))


def _log_message(line: str) -> str:
    """Return the message of a log line; for JSON, the message field or the last line of its exception."""
    try:
        fields = json.loads(line)
        text = fields.get("exception") or fields["message"]
    except (ValueError, AttributeError, KeyError):
        return line
    return str(text).strip().splitlines()[-1]


def tail(log_path: Path, max_bytes: int = MAX_TAIL_BYTES) -> list[str]:
    """Return the last non-empty lines of a log file."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - max_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()]


def _kill_with_parent() -> Callable[[], None] | None:
    """Return a function to run between fork and exec: the kernel then kills the child when this process ends."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask
