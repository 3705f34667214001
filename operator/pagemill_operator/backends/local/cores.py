"""How many cores this process may use, by affinity and by the cgroup's quota."""

from __future__ import annotations

import math
import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpu_max: Path = CPU_MAX) -> int:
    """At least 1. `cpu_max`: file of the cgroup v2 quota, `QUOTA PERIOD` in microseconds or `max PERIOD`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text("ascii").split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def threads_per_engine(cores: int, num_engines: int) -> int:
    """An equal share of the cores, so that engines do not take turns on them."""
    return max(1, cores // max(1, num_engines))
