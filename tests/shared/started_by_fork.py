"""Lets tests start programs of this repository as forks of a process that has imported them (`fork_server`).

Importing takes most of a start's CPU time: 0.7 s of a gateway, 0.5 s of an engine's server, and `make test` starts
hundreds. `install` replaces `subprocess.Popen`, also for asyncio; a command `python -m MODULE` of one of `MODULES` is
then forked, and all else of it is what it would be: a child of this process with its own arguments, environment and
descriptors. Commands that ask for more are executed, and so are those within `executed`.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MODULES = (
    "failing_rank",
    "pagemill",
    "pagemill_engine.server",
    "pagemill_engine.loop.process",
    "pagemill_execution.starting.rank_process",
    "pagemill_gateway",
    "pagemill_gateway.processes",
)
READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_", "PAGEMILL_KERNEL", "TZ", "LC_", "LANG")
"""Beginnings of variables that the interpreter or a library reads before the program's own code."""
EXECUTE = "PAGEMILL_TESTS_EXECUTE"
MAX_REQUEST_BYTES = 2**20
MAX_FILES = 16
PR_SET_CHILD_SUBREAPER = 36
_signature = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


class _ForkServer:
    """A connection to a fork server, which is started for the first fork unless it exists."""

    def __init__(
        self, connection: socket.socket | None = None, pid: int | None = None, num_forks: int | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._connection = connection
        self._pid, self._num_forks = pid, num_forks
        self._environment = dict(os.environ)

    def serves(self, environment: dict[str, str]) -> bool:
        """Return whether it can fork once more, and a fork lacks nothing that an interpreter reads at its start."""
        return self._num_forks != 0 and not any(
            self._environment.get(name) != environment.get(name)
            for name in self._environment.keys() | environment.keys()
            if name.startswith(READ_AT_START)
        )

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """Return the process id of a new child, which this process adopts."""
        libc = ctypes.CDLL(None)
        with self._lock:
            if self._connection is None:
                self._connection = _started()
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], files)
                pid = int(self._connection.recv(32))
            finally:
                libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            if self._num_forks is not None:
                self._num_forks -= 1
                if self._num_forks == 0 and self._pid is not None:
                    os.waitpid(self._pid, 0)
        return pid


def connected() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection for requests."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_BYTES)
    return ends


def _started() -> socket.socket:
    """Start a fork server, which ends when this process closes the connection."""
    import fork_server

    ours, theirs = connected()
    command = [sys.executable, fork_server.__file__, str(theirs.fileno()), fork_server.PADDING]
    process = _Executed(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    process.returncode = 0  # nothing waits for it
    theirs.close()
    atexit.register(ours.close)
    return ours


_Executed = subprocess.Popen
_server = _ForkServer()


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    def _execute_child(self, *values: Any) -> None:
        given = _signature.bind(self, *values).arguments
        request = _request(given)
        if request is None:
            super()._execute_child(*values)  # type: ignore[misc]
            return
        own = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        inherited = list(given["pass_fds"])
        files = [number if file == -1 else file for number, file in enumerate(own)] + inherited
        self.pid = _server.fork(request | {"targets": [0, 1, 2, *inherited]}, files)
        self._child_created = True
        ends = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def _request(given: dict[str, Any]) -> dict[str, Any] | None:
    """Return what to fork, or None if the command must be executed."""
    argv = given["args"]
    if isinstance(argv, (str, bytes, os.PathLike)) or given["shell"] or EXECUTE in os.environ:
        return None
    argv = [os.fsdecode(part) for part in argv]
    if argv[:2] != [sys.executable, "-m"] or argv[2] not in MODULES:
        return None
    before = given["preexec_fn"]
    ends_with_parent = getattr(before, "__qualname__", "") == "_kill_with_parent.<locals>.ask"
    changed = any(given[name] not in (None, -1) for name in ("gid", "gids", "uid", "umask", "process_group"))
    if changed or (before and not ends_with_parent) or len(given["pass_fds"]) > MAX_FILES - 3:
        return None
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in (given["env"] or os.environ).items()}
    if not _server.serves(environment):
        return None
    return {
        "argv": argv[2:],
        "environment": environment,
        "folder": str(Path(os.fsdecode(given["cwd"] or ".")).absolute()),
        "session": bool(given["start_new_session"]),
        "ends_with_parent": ends_with_parent,
        "parent": os.getpid(),
    }


@contextmanager
def executed() -> Iterator[None]:
    """Within the block, programs are executed."""
    os.environ[EXECUTE] = "1"
    try:
        yield
    finally:
        del os.environ[EXECUTE]


def install(connection: socket.socket | None = None, pid: int | None = None, num_forks: int | None = None) -> None:
    """Fork from now on, in this process, through this connection to a fork server if there is one."""
    global _server
    _server = _ForkServer(connection, pid, num_forks)
    subprocess.Popen = _Popen  # type: ignore[misc]
