"""What rivals measure of a simulated fleet, where their platform has no such number as ours.

Only Pagemill's gateway holds requests until an engine has room. On the other platforms they wait in the engines, so
what is held counts there, in equal parts.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from pagemill_simulator.scaling.policy import Bounds, PodSeen, Seen


class EngineSeen(NamedTuple):
    """A ready engine as its metrics tell of it."""

    name: str
    num_running: int
    num_waiting: float
    """Its part of what the gateway holds included."""
    kv_usage: float


def engines(seen: Seen) -> list[EngineSeen]:
    """Those that tell; an engine that loads has no metrics, and what is no number is none."""
    held = seen.num_held / max(1, seen.ready)
    return [
        EngineSeen(pod.name, pod.num_running, pod.num_waiting + held, pod.kv_usage)
        for pod in seen.pods
        if pod.is_ready and _is_sound(pod)
    ]


def _is_sound(pod: PodSeen) -> bool:
    return pod.num_running >= 0 and pod.num_waiting >= 0 and 0 <= pod.kv_usage < math.inf


def within(bounds: Bounds, replicas: float, *, least: int = 0) -> int:
    """`least`: of platforms that go no lower, whatever the user allows. What is no number is the least."""
    wanted = int(min(replicas, bounds.max_replicas)) if replicas > 0 else 0
    return min(bounds.max_replicas, max(bounds.min_replicas, least, wanted))


class Window:
    """Samples of the last seconds."""

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, at_s: float, value: float) -> None:
        """A clock that went back begins anew."""
        if self._samples and at_s < self._samples[-1][0]:
            self._samples.clear()
        self._samples.append((at_s, value))
        while len(self._samples) > 1 and self._samples[0][0] <= at_s - self.length_s:
            self._samples.popleft()

    @property
    def mean(self) -> float:
        return math.fsum(value for _, value in self._samples) / max(1, len(self._samples))

    @property
    def max(self) -> float:
        return max((value for _, value in self._samples), default=0.0)


class Timer:
    """When the next decision is due; a fleet may ask in between, for a request that finds no pod."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_s = -math.inf

    def is_due(self, at_s: float) -> bool:
        if 0 <= at_s - self._last_s < self._interval_s * (1 - 1e-6):
            return False
        self._last_s = at_s
        return True
