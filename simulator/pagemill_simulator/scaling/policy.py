"""What a scaling policy of a simulated fleet sees, and what it answers.

Everything that one of the policies needs is in here, measured by the fleet as that platform would measure it: gauges of
pods for those that scrape, the load stream's signals for Pagemill's own. A policy keeps what it remembers to itself.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from pagemill_operator.autoscaler.signals import Signals


class PodSeen(NamedTuple):
    """One pod that was ordered and is neither gone nor on its way out."""

    name: str
    is_ready: bool
    num_running: int = 0
    num_waiting: int = 0
    """In the engine's own queue."""
    kv_usage: float = 0.0
    """Share of the blocks that running requests hold, 0 to 1."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment at one instant."""

    at_s: float
    wanted: int
    """Replicas as they were ordered last."""
    pods: tuple[PodSeen, ...]
    num_held: int
    """Requests that wait in the gateway, for room or for the first pod."""
    num_arrived: int
    """Since the beginning."""
    num_prompt_tokens_arrived: int
    num_output_tokens_made: int
    num_on_leaving: int = 0
    """Requests that pods on their way out still run."""
    signals: Signals
    """What Pagemill's autoscaler is given, at this same instant."""

    @property
    def ready(self) -> int:
        return sum(pod.is_ready for pod in self.pods)

    @property
    def concurrency(self) -> int:
        """Requests anywhere in the system."""
        return self.num_held + self.num_on_leaving + sum(pod.num_running + pod.num_waiting for pod in self.pods)


class Bounds(NamedTuple):
    """What the user allows, the same for every policy."""

    min_replicas: int
    max_replicas: int


class ScalingPolicy(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def interval_s(self) -> float:
        """Between two decisions."""
        ...

    @property
    def wakes_at_once(self) -> bool:
        """A request that finds no pod, not even a starting one, is told to it at once; else at the next decision."""
        ...

    def decide(self, seen: Seen) -> int:
        """Replicas from now on, within its bounds."""
        ...
