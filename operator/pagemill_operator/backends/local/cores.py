"""How the replicas of one machine share its cores. How many there are: `pagemill_protocol.cgroup`."""

from __future__ import annotations


def threads_per_engine(cores: int, num_engines: int) -> int:
    """An equal share of the cores, so that engines do not take turns on them."""
    return max(1, cores // max(1, num_engines))
