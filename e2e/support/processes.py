"""The processes of pods on the machine of the one-node cluster, where tests kill, pause and measure them.

Processes are found by their pod's uid in /proc/*/cgroup, so the pod needs no special program.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    pid: int
    command: str

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    @property
    def rss_bytes(self) -> int:
        return self._status_kib("VmRSS") * 1024

    @property
    def peak_rss_bytes(self) -> int:
        return self._status_kib("VmHWM") * 1024

    @property
    def cpu_s(self) -> float:
        """Return the user and system time so far in seconds."""
        fields = (PROC / str(self.pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def _status_kib(self, name: str) -> int:
        lines = (PROC / str(self.pid) / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def of_pod(pod: dict[str, Any], program: str) -> list[Process]:
    """Return the pod's processes whose command line contains `program`, parents first; fail if there is none."""
    uid = pod["metadata"]["uid"]
    found = [process for process in _all_of(uid) if program in process.command]
    assert found, f"pod {pod['metadata']['name']} has no process of {program}"
    return found


def kill_pod(pod: dict[str, Any], program: str) -> None:
    """Send SIGKILL to the container's first process; the kernel then kills all others of its PID namespace."""
    of_pod(pod, program)[0].signal(signal.SIGKILL)


def _all_of(uid: str) -> list[Process]:
    marks = (uid, uid.replace("-", "_"))
    found = []
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            cgroup = (folder / "cgroup").read_text()
            if any(mark in cgroup for mark in marks):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(Process(int(folder.name), command))
        except OSError:
            continue  # the process ended meanwhile
    return sorted(found, key=lambda process: process.pid)


def restart_count(pod: dict[str, Any]) -> int:
    """Return how often the pod's only container was restarted."""
    count: int = pod["status"]["containerStatuses"][0]["restartCount"]
    return count
