"""How much memory this process may take, in all and still: the machine's or the cgroup's, whichever is less."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

from pagemill_protocol.cgroup import ROOT, folders, read

_VERSIONS = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
"""Cgroups 2 and 1: the files of limit and usage, and how the fields of `memory.stat` begin."""


class MemoryState(NamedTuple):
    """All at one moment."""

    limit_bytes: int
    available_bytes: int
    process_bytes: int
    """What this process alone has written; what lies in files, such as code, can be read from there again."""
    is_gpu: bool = False
    """A device's own memory: what weights and steps leave of it is there for the KV cache."""


def measure_memory(cgroup: Path = ROOT) -> MemoryState:
    memory = psutil.Process().memory_info()
    limit = memory_limit(cgroup)
    return MemoryState(limit, min(limit, available_memory(cgroup)), memory.rss - getattr(memory, "shared", 0))


def memory_limit(cgroup: Path = ROOT) -> int:
    """Bytes that this process could have if nothing else ran."""
    total: int = psutil.virtual_memory().total
    limits = [read(folder / limit) for folder in folders("memory", cgroup) for limit, *_ in _VERSIONS]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def available_memory(cgroup: Path = ROOT) -> int:
    """Bytes that are free now, never negative."""
    free: int = psutil.virtual_memory().available
    rooms = [_room(folder, *version) for folder in folders("memory", cgroup) for version in _VERSIONS]
    return max(0, min([free, *(room for room in rooms if room is not None)]))


def _room(group: Path, limit: str, usage: str, prefix: str) -> int | None:
    """What the limit leaves; `None` without a limit. Page cache does not count: the kernel gives it back first."""
    limit_text, usage_text = read(group / limit), read(group / usage)
    if not limit_text.isdigit() or not usage_text.isdigit():
        return None
    fields = dict(line.split(maxsplit=1) for line in read(group / "memory.stat").splitlines() if " " in line)
    cached = sum(int(fields.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
    return int(limit_text) - int(usage_text) + cached
