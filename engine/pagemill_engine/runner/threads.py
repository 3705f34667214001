"""How many compute threads this process may use: CPU affinity and the cgroup's CPU quota, whichever is less."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_V1_FOLDERS = ("cpu", "cpu,cpuacct")


def available_threads(cgroup: Path = _CGROUP) -> int:
    """At least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(cgroup)
    return max(1, cores if quota is None else min(cores, math.floor(quota)))


def _cgroup_quota(cgroup: Path) -> float | None:
    """Cores granted by cgroup v2 or v1; `None` without a limit."""
    fields = _read(cgroup / "cpu.max").split()
    if len(fields) == 2:
        return None if fields[0] == "max" else int(fields[0]) / int(fields[1])
    for folder in _V1_FOLDERS:
        quota, period = _read(cgroup / folder / "cpu.cfs_quota_us"), _read(cgroup / folder / "cpu.cfs_period_us")
        if quota and period:
            return int(quota) / int(period) if int(quota) > 0 else None
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
