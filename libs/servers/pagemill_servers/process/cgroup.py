"""Resource limits that a container or service manager sets for this process: their location and the usable cores.

A container usually sees its own control group as the root; a service under systemd, or a container in the host's
namespace, sees its group further down, and every group above limits it as well. Versions 1 and 2 are read. Callers
apply the limits: engine threads, memory, replicas of `pagemill up`.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[Path]:
    """Return the folders of all groups that limit this process, its own first. Some may be missing or set no limit.

    `controller`: name as in version 1, such as `cpu`. `membership`: lines `NUMBER:CONTROLLERS:PATH`, where version 2
    has no controllers.
    """
    found: list[Path] = []
    for line in read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _up_to(root, path)
        elif controller in controllers.split(","):
            found += _up_to(root / controllers, path) + _up_to(root / controller, path)
    return list(dict.fromkeys([*found, root, root / controller, root / "cpu,cpuacct"]))


def usable_cores(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int:
    """Return the minimum of CPU affinity and quotas, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in folders("cpu", root, membership) if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([cores, *map(math.floor, quotas)]))


def read(path: Path) -> str:
    """Return the stripped content of a file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _up_to(root: Path, path: str) -> list[Path]:
    own = root / path.lstrip("/")
    return [own, *(folder for folder in own.parents if folder.is_relative_to(root))]


def _cpu_quota(folder: Path) -> float | None:
    """Return the cores granted to one group, or None without a limit."""
    fields = read(folder / "cpu.max").split()
    if len(fields) != 2:
        fields = [read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")]
    quota, period = fields
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None
