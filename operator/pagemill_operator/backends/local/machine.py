"""What this machine has for replicas, and how they share it: its cores and its NVIDIA devices.

How many cores there are: `pagemill_protocol.cgroup`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Limits the devices that CUDA sees; a user may have set it."""
DEVICES = Path("/dev")


def visible_gpus(environment: Mapping[str, str], devices: Path = DEVICES) -> tuple[str, ...]:
    """Numbers or names of devices, as CUDA takes them: those that the environment leaves, else all of the driver's."""
    if VISIBLE in environment:
        named = (name.strip() for name in environment[VISIBLE].split(","))
        return tuple(name for name in named if name)
    return tuple(str(number) for number, _ in enumerate(devices.glob("nvidia[0-9]*")))


def least_used(gpus: Sequence[str], in_use: Iterable[str | None]) -> str | None:
    """The first of those that fewest replicas use; None where there is none."""
    uses = Counter(in_use)
    return min(gpus, key=lambda gpu: uses[gpu], default=None)


def threads_per_engine(cores: int, num_engines: int) -> int:
    """An equal share of the cores, so that engines do not take turns on them."""
    return max(1, cores // max(1, num_engines))
