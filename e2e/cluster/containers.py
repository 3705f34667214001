"""Controls the node's containerd with `ctr`: images, and signals to the containers of pods."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import binaries
from layout import CONTAINERD_SOCKET, RUN

TASKS = RUN / "containerd" / "io.containerd.runtime.v2.task" / "k8s.io"
STOP_TIMEOUT_S = 10.0


class ContainerError(Exception):
    """Raised if containerd refuses a command; the message is containerd's."""


def argv(*arguments: str) -> list[str]:
    """Return the command line of `ctr` for this node."""
    program = str(binaries.bin_dir() / "ctr")
    return [program, "--address", str(CONTAINERD_SOCKET), "--namespace", "k8s.io", *arguments]


def ctr(*arguments: str) -> str:
    done = subprocess.run(argv(*arguments), capture_output=True, text=True)
    if done.returncode != 0:
        raise ContainerError(f"ctr {' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout


def image_names() -> set[str]:
    return set(ctr("images", "ls", "-q").split())


def blob_digests() -> set[str]:
    return set(ctr("content", "ls", "-q").split())


def send(container: str, action: str) -> None:
    """`kill`, `pause` or `resume` a container. SIGKILL is sent from outside: PID 1 of a container ignores its own."""
    arguments = {
        "kill": ["tasks", "kill", "--signal", "SIGKILL", container],
        "pause": ["tasks", "pause", container],
        "resume": ["tasks", "resume", container],
    }[action]
    ctr(*arguments)


def end_all() -> None:
    """Kill every container and the shims that watch them, then remove their records; the images stay."""
    for file in TASKS.glob("*/init.pid"):
        _kill_container(file.parent.name, int(file.read_text()))
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for pid in _shims():
        os.kill(pid, signal.SIGKILL)
    while list(_shims()) and time.monotonic() < deadline:
        time.sleep(0.05)


def forget_all() -> None:
    """Remove the records of ended containers, so that the next cluster starts without them."""
    for container in ctr("containers", "ls", "-q").split():
        ctr("containers", "rm", container)


def _kill_container(container: str, pid: int) -> None:
    """Kill a container's process if it is still in that container's control group, because process ids are reused."""
    try:
        if container in Path(f"/proc/{pid}/cgroup").read_text():
            _thaw(container)
            os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return


def _thaw(container: str) -> None:
    """Resume a paused container, which could not be killed otherwise (control groups version 1)."""
    for state in Path("/sys/fs/cgroup/freezer").glob(f"**/{container}/freezer.state"):
        state.write_text("THAWED")


def _shims() -> Iterable[int]:
    for link in Path("/proc").glob("[0-9]*/exe"):
        try:
            program = os.readlink(link)
            arguments = (link.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if program.endswith("/containerd-shim-runc-v2") and f"{RUN}/".encode() in arguments:
            yield int(link.parent.name)
