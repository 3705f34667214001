"""Memory, CPU time and lifetime of the processes that a benchmark starts, for whole process trees."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil


class Memory(NamedTuple):
    """Memory of a process tree in MiB. PSS divides shared pages among processes; RSS counts them in each."""

    rss_mib: float
    pss_mib: float


def tree_memory(pid: int) -> Memory:
    root = psutil.Process(pid)
    pids = [root.pid, *(child.pid for child in root.children(recursive=True))]
    return Memory(*(sum(_rollup(each, key) for each in pids) / 1024 for key in ("Rss:", "Pss:")))


def tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds, user and kernel, of a process and its running descendants."""
    root = psutil.Process(pid)
    return sum(_cpu_s(each) for each in [root.pid, *(child.pid for child in root.children(recursive=True))])


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process's threads and of its ended children (proc(5)); 0 if it has just ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = text.rpartition(")")[2].split()  # the name may contain anything, also parentheses
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _rollup(pid: int, key: str) -> int:
    """Return KiB from the kernel's summary of a process's mappings; 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(key))


def stop(process: subprocess.Popen[str]) -> float:
    """Ask a process to end as a user would and wait; return its exit code. Kill it after 20 s."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def give_cores(servers: Sequence[int], others: Sequence[int]) -> None:
    """Pin each server's engine process to one of the last cores, and all others to the remaining cores.

    Nothing is done on a machine with too few cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    shared = cores[: len(cores) - len(servers)]
    if not shared:
        return
    for server, core in zip(servers, reversed(cores), strict=False):
        for computing in psutil.Process(server).children():
            _pin_threads(computing.pid, [core])
    for pid in (*servers, *others):
        _pin_threads(pid, shared)


def _pin_threads(pid: int, cores: Sequence[int]) -> None:
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, cores)
