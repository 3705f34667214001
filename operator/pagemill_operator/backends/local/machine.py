"""The resources of this machine that replicas share: its cores and its NVIDIA devices.

`pagemill_servers.process.cgroup` counts the cores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Limits the devices that CUDA sees; a user may have set it."""
DEVICES = Path("/dev")


def visible_gpus(environment: Mapping[str, str], devices: Path = DEVICES) -> tuple[str, ...]:
    """Return the devices, by number or name as CUDA takes them: the environment's, or else all of the driver's."""
    if VISIBLE in environment:
        named = (name.strip() for name in environment[VISIBLE].split(","))
        return tuple(name for name in named if name)
    return tuple(str(number) for number, _ in enumerate(devices.glob("nvidia[0-9]*")))


def least_used(gpus: Sequence[str], in_use: Iterable[str], number: int) -> tuple[str, ...]:
    """Return the first `number` of the devices that the fewest replicas use, or all if there are fewer."""
    uses = Counter(in_use)
    return tuple(sorted(gpus, key=lambda gpu: uses[gpu])[:number])


def threads_per_engine(cores: int, num_engines: int) -> int:
    """Return an equal share of the cores, so that engines do not take turns on them."""
    return max(1, cores // max(1, num_engines))
