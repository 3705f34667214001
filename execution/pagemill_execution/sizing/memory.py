"""Measures this process's memory, limit and use: the machine's or the cgroup's, whichever is less."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from pagemill_servers.process.cgroup import ROOT, folders, read

_VERSIONS = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
"""Cgroups 2 and 1: the files of limit and usage, and the prefix of the fields of `memory.stat`."""


class MemoryState(NamedTuple):
    """Memory at one moment."""

    limit_bytes: int
    available_bytes: int
    process_bytes: int
    """Memory that only this process has written. Pages of files, such as code, can be read again and do not count."""
    is_gpu: bool = False
    """Whether it is a device's own memory, of which the KV cache may take what weights and steps leave."""


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The division of the usable memory: all parts and the free memory add up to the limit."""

    limit_bytes: int
    """Memory of the machine or of the container, whichever is less."""
    process_bytes: int
    """Memory of the engine process before it loads: interpreter and libraries, without pages of files."""
    other_bytes: int
    """Other memory in use at that time, including the server process."""
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    """Activations of the largest step, from the model's shapes or measured."""
    measured: bool = False
    """Whether `activation_bytes` was measured in steps, with rows, libraries and recorded decodes."""
    adapter_bytes: int = 0
    """All adapters that are kept in memory."""

    @property
    def free_bytes(self) -> int:
        """Memory that is left when cache and step have their largest size; negative if they do not fit."""
        used = self.process_bytes + self.other_bytes
        used += self.weight_bytes + self.adapter_bytes
        return self.limit_bytes - used - self.kv_bytes - self.activation_bytes


def measure_memory(cgroup: Path = ROOT) -> MemoryState:
    memory = psutil.Process().memory_info()
    limit = memory_limit(cgroup)
    return MemoryState(limit, min(limit, available_memory(cgroup)), memory.rss - getattr(memory, "shared", 0))


def memory_limit(cgroup: Path = ROOT) -> int:
    """Return the bytes that this process could have if nothing else ran."""
    total: int = psutil.virtual_memory().total
    limits = [read(folder / limit) for folder in folders("memory", cgroup) for limit, *_ in _VERSIONS]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def available_memory(cgroup: Path = ROOT) -> int:
    """Return the bytes that are free now, never negative."""
    free: int = psutil.virtual_memory().available
    free_in_groups = [_free_bytes(folder, *version) for folder in folders("memory", cgroup) for version in _VERSIONS]
    return max(0, min([free, *(each for each in free_in_groups if each is not None)]))


def _free_bytes(group: Path, limit: str, usage: str, prefix: str) -> int | None:
    """Return the bytes that the cgroup's limit leaves; None without a limit.

    Page cache counts as free: the kernel reclaims it first.
    """
    limit_text, usage_text = read(group / limit), read(group / usage)
    if not limit_text.isdigit() or not usage_text.isdigit():
        return None
    fields = dict(line.split(maxsplit=1) for line in read(group / "memory.stat").splitlines() if " " in line)
    cached = sum(int(fields.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
    return int(limit_text) - int(usage_text) + cached
