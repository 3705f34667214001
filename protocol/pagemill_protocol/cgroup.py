"""What a container or a service manager grants this process: where the limits are written, and its cores.

A container mostly sees its own control group as the root; a service under systemd, or a container in the host's
namespace, sees its group somewhere below, and each group above limits it as well. Versions 1 and 2 alike. What is made
of the limits is the callers': threads of the engine, its memory, the replicas of `pagemill up`.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[Path]:
    """Of all groups that limit this process, its own first. Some may not be there, or say nothing.

    `controller`: as version 1 names it, such as `cpu`. `membership`: lines `NUMBER:CONTROLLERS:PATH`; version 2 has
    no controllers there.
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
    """By affinity and by the quotas, whichever is least; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in folders("cpu", root, membership) if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([cores, *map(math.floor, quotas)]))


def read(path: Path) -> str:
    """Without blanks around it; empty where there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _up_to(root: Path, path: str) -> list[Path]:
    own = root / path.lstrip("/")
    return [own, *(folder for folder in own.parents if folder.is_relative_to(root))]


def _cpu_quota(folder: Path) -> float | None:
    """Cores that one group is granted; `None` without a limit."""
    fields = read(folder / "cpu.max").split()
    if len(fields) != 2:
        fields = [read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")]
    quota, period = fields
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None
