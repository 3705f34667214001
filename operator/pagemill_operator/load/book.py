"""The latest frame of every gateway, and what they say together of one deployment.

Every gateway hears every engine, so their reports of one deployment are views of the same thing: the freshest counts,
sums would count twice. Only their queues are their own and add up. How much of it `status` shows, and how often, is
decided in `status.load`; how many replicas it asks for, in `autoscaler`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from pagemill_operator.autoscaler.signals import View, most_held
from pagemill_protocol.load import DeploymentLoad, EngineHeld, EngineStart, LoadFrame


class Summary(NamedTuple):
    """What `status.load` is made from."""

    kv_cache_usage: float | None
    """Share of all blocks held by running requests; None where no engine is known."""
    running: int
    waiting: int
    """In engines, and in the gateways' queues."""
    ready: int
    """Engines that at least one gateway sends requests to."""


class _Heard(NamedTuple):
    load: DeploymentLoad
    at_s: float
    """When the frame came, on our clock."""

    @property
    def counts(self) -> tuple[int, ...]:
        engines, queue, pods = self.load.engines, self.load.queue, self.load.pods
        usage = round(100 * engines.num_blocks_active / max(1, engines.num_blocks_total))
        return usage, engines.num_requests_running, engines.num_requests_waiting, pods.ready, queue.num_requests


class LoadBook:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, dict[str, _Heard]] = {}
        """Gateway -> deployment's key -> what it said."""

    def hear(self, gateway: str, frame: LoadFrame) -> set[str]:
        """Keys about which the gateway says something else than before."""
        now, before = self._clock(), self._heard.get(gateway, {})
        self._heard[gateway] = after = {load.key: _Heard(load, now) for load in frame.deployments}
        return {key for key, heard in after.items() if key not in before or before[key].counts != heard.counts}

    def lost(self, gateway: str) -> None:
        self._heard.pop(gateway, None)

    def views(self, key: str) -> list[View]:
        """What each gateway that knows the deployment said last."""
        now = self._clock()
        return [View(heard.load, now - heard.at_s) for heard in self._of(key)]

    def held(self, key: str) -> dict[str, EngineHeld]:
        """By engine, the most that any gateway says of it."""
        return most_held(heard.load for heard in self._of(key))

    def starts(self, key: str) -> dict[str, EngineStart]:
        """By engine, how its start went, and its latest wake."""
        return {start.id: start for heard in self._of(key) for start in heard.load.starts}

    def asleep(self, key: str) -> frozenset[str]:
        """Engines that say so to any gateway: none is taken for awake too early."""
        return frozenset(engine for heard in self._of(key) for engine in heard.load.asleep)

    def needs_engine(self, key: str) -> bool:
        """Somebody waits where no engine is."""
        return any(heard.load.queue.needs_engine for heard in self._of(key))

    def summary(self, key: str) -> Summary | None:
        """None while no gateway knows the deployment."""
        heard = self._of(key)
        if not heard:
            return None
        best = max(heard, key=lambda each: (each.load.engines.num_reporting > 0, each.at_s - _age(each.load)))
        engines = best.load.engines
        usage = engines.num_blocks_active / engines.num_blocks_total if engines.num_blocks_total > 0 else None
        return Summary(
            kv_cache_usage=None if usage is None else min(1.0, max(0.0, usage)),
            running=max(0, engines.num_requests_running),
            waiting=max(0, engines.num_requests_waiting) + sum(max(0, each.load.queue.num_requests) for each in heard),
            ready=max(each.load.pods.ready for each in heard),
        )

    def _of(self, key: str) -> list[_Heard]:
        return [loads[key] for loads in self._heard.values() if key in loads]


def _age(load: DeploymentLoad) -> float:
    return load.engines.age_s if math.isfinite(load.engines.age_s) else 0.0
