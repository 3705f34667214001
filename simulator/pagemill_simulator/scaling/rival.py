"""Common parts of other platforms' policies: the operator's protocol plus the interval of their own documents.

Only Pagemill's gateway holds requests until an engine has capacity. On the other platforms they wait in the engines, so
the gateway's waiting requests count there, in equal parts. Windows and timers are values in a policy's memory.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeVar

import msgspec

from pagemill_operator.autoscaler.policy import ScalingPolicy
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Signals
from pagemill_protocol.report.load import EngineReport

M = TypeVar("M")


class Rival(ScalingPolicy[M], Protocol[M]):
    @property
    def interval_s(self) -> float:
        """Seconds between two decisions."""
        ...

    @property
    def wakes_at_once(self) -> bool:
        """Whether a request that finds no pod causes a decision at once."""
        ...


def engines(signals: Signals) -> list[EngineReport]:
    """Return the engines that report all of their metrics."""
    return [replica for replica in signals.replicas if replica.load.num_kv_bytes_total > 0]


def num_waiting(engine: EngineReport, signals: Signals) -> float:
    """Return the requests that would wait in the engine: its own, and its part of those that wait in the gateway."""
    return engine.load.num_requests_waiting + signals.queue.num_requests / max(1, signals.fleet.ready)


def within(settings: ScalingSettings, replicas: float, *, least: int = 0) -> int:
    """Clamp to the user's bounds; `least` is the platform's own minimum. NaN becomes the minimum."""
    wanted = int(min(replicas, settings.max_replicas)) if replicas > 0 else 0
    return min(settings.max_replicas, max(settings.min_replicas, least, wanted))


class LoadSample(msgspec.Struct, frozen=True, array_like=True):
    at_s: float
    value: float


class LoadWindow(msgspec.Struct, frozen=True):
    """Samples of the last seconds."""

    samples: tuple[LoadSample, ...] = ()

    def add(self, at_s: float, value: float, length_s: float) -> LoadWindow:
        """Return the window with a new sample; a clock that went back starts a new window."""
        if self.samples and at_s < self.samples[-1].at_s:
            return LoadWindow((LoadSample(at_s, value),))
        kept = [each for each in self.samples if each.at_s > at_s - length_s]
        return LoadWindow((*kept, LoadSample(at_s, value)))

    @property
    def mean(self) -> float:
        return math.fsum(each.value for each in self.samples) / max(1, len(self.samples))

    @property
    def max(self) -> float:
        return max((each.value for each in self.samples), default=0.0)


def is_due(at_s: float, last_s: float | None, interval_s: float) -> bool:
    """Whether the next decision is due; a policy may be asked earlier, for a request that finds no pod."""
    return last_s is None or not 0 <= at_s - last_s < interval_s * (1 - 1e-6)
