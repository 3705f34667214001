"""Starts programs of this repository as forks of a process that has imported them already.

It is run by `started_by_fork`, as a child of the tests' process, and waits there for requests on a socket. A fork that
was requested becomes a child of the process that asked: what lies between ends at once, and that process adopts it. It
then runs its module as `python -m` does, with the environment, descriptors and folder that it was given.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import started_by_fork

PR_SET_PDEATHSIG = 1
IMPORTED = (
    "pagemill.main",
    "pagemill.commands.serve",
    "pagemill.commands.up",
    "pagemill.up.loading",
    "pagemill.up.screen",
    "pagemill.up.session",
    "pagemill_engine.loop.process",
    "pagemill_engine.server.main",
    "pagemill_engine.server.settings",
    "pagemill_execution.starting.load_cpu",
    "pagemill_execution.starting.rank_process",
    "pagemill_gateway.processes.server",
    "pagemill_gateway.processes.supervisor",
    "pagemill_gateway.processes.__main__",
    "pagemill_operator.backends.local",
    "pagemill_servers.process.malloc",
    "failing_rank",
    "uvloop",
)
RUN = (
    "failing_rank",
    "pagemill_engine.loop.process",
    "pagemill_execution.starting.rank_process",
    "pagemill_gateway.processes.__main__",
)
"""Of these, what is a program itself: each fork runs it anew, under the name `__main__`."""
STARTING = {"pagemill": None, "pagemill_engine.server": 1}
"""Programs that start others: of so many, if not None, they ask a fork server of their own."""
PADDING = "x" * 2048
"""An argument of this process, to be overwritten by the longer command line of a fork."""


def serve(connection: socket.socket, num_forks: int | None = None) -> dict[str, Any]:
    """Fork for each request, and end after the last or with the process that asks. Only the forks return, each with
    its request.
    """
    while num_forks != 0:
        message, files, _, _ = socket.recv_fds(connection, started_by_fork.MAX_REQUEST_BYTES, started_by_fork.MAX_FILES)
        if not message:
            break
        adopted, adopt = os.pipe()
        answered, answer = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(answer, str(child).encode())
                os._exit(0)
            for descriptor in (adopt, answered, answer):
                os.close(descriptor)
            os.read(adopted, 1)  # until the parent is the one that asked
            os.close(adopted)
            connection.close()
            return _become(json.loads(message), files)
        pid = os.read(answered, 32)
        os.waitpid(between, 0)
        for descriptor in (adopted, adopt, answered, answer, *files):
            os.close(descriptor)
        connection.send(pid)
        num_forks = None if num_forks is None else num_forks - 1
    os._exit(0)


def _become(request: dict[str, Any], files: list[int]) -> dict[str, Any]:
    """Take over session, descriptors, folder and environment of the request."""
    if request["session"]:
        os.setsid()
    program = request["argv"][0]
    if program in STARTING:
        ours, theirs = (_above(end, max(request["targets"])) for end in started_by_fork.connected())
        server = os.fork()
        if server == 0:
            ours.close()
            for file in files:
                os.close(file)
            return serve(theirs, STARTING[program])
        theirs.close()
        started_by_fork.install(ours, server, STARTING[program])
    unused = max(request["targets"]) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, unused) for file in files]
    for file in files:
        os.close(file)
    for file, target in zip(moved, request["targets"], strict=True):
        os.dup2(file, target, inheritable=True)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _show([sys.executable, "-m", *request["argv"]])
    if request["ends_with_parent"]:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != request["parent"]:
            os._exit(1)
    return request


def _above(end: socket.socket, descriptor: int) -> socket.socket:
    """Return the same end with a higher descriptor than this one."""
    with end:
        return socket.socket(fileno=fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, descriptor + 1))


def _show(command: list[str]) -> None:
    """Let the list of processes show this command, in the way of setproctitle(3): the last byte of the arguments that
    the process was started with is not zero.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    shown = " ".join(command).encode()[: end - begin - 2]
    ctypes.memmove(begin, shown.ljust(end - begin - 1, b"\0") + b"x", end - begin)


def main() -> None:
    """Serve; in a fork, run the requested module."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    for name in IMPORTED:
        importlib.import_module(name)
    for name in RUN:
        del sys.modules[name]
    gc.collect()
    gc.freeze()
    request = serve(connection)
    sys.argv[:] = request["argv"]
    sys.path.insert(0, request["folder"])
    runpy._run_module_as_main(request["argv"][0])  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
