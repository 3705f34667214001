"""Knative's pod autoscaler (KPA): concurrency over a stable window of a minute, and over a panic window in a surge.

Source: https://knative.dev/docs/serving/autoscaling/kpa-specific/ (11fd424 of https://github.com/knative/docs) and
docs/scaling/SYSTEM.md of https://github.com/knative/serving (254c92c), defaults of `config-autoscaler`: every two
seconds, the requests in the system divided by the target, from both windows. A panic begins when the short window asks
for twice the ready replicas, lasts until that was not so for a stable window, and only adds replicas; at most 1000
times as many replicas, at least half as many. The last replica is removed after the scale-to-zero grace period; a
request at zero wakes it at once.
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from pagemill_operator.autoscaler.decision import Decision, decided
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Signals
from pagemill_simulator.parameters import Factor, NotNegative, Parameters, Positive, Share
from pagemill_simulator.scaling.rival import LoadWindow, is_due, within


class Knative(Parameters, frozen=True, kw_only=True):
    """Scales by concurrency, with a panic window."""

    name: ClassVar[str] = "knative"
    target_concurrency: Positive = 100.0
    """`container-concurrency-target-default`: requests per replica."""
    target_utilization: Share = 0.7
    """`container-concurrency-target-percentage`: the aimed-at share of that."""
    interval_s: Positive = 2.0
    """`tick-interval`: seconds between decisions."""
    stable_window_s: Positive = 60.0
    """`stable-window`."""
    panic_window_share: Share = 0.1
    """`panic-window-percentage`."""
    panic_threshold: Factor = 2.0
    """`panic-threshold-percentage`: multiple of the ready replicas' target."""
    most_up: Factor = 1000.0
    """`max-scale-up-rate`."""
    most_down: Factor = 2.0
    """`max-scale-down-rate`."""
    grace_s: NotNegative = 30.0
    """`scale-to-zero-grace-period`."""

    @property
    def target(self) -> float:
        """The target per replica; at least one hundredth of a request."""
        return max(0.01, self.target_concurrency * self.target_utilization)

    def policy(self) -> KnativeKpa:
        return KnativeKpa(self)


class KnativeMemory(msgspec.Struct, frozen=True):
    decided_at_s: float | None = None
    stable: LoadWindow = LoadWindow()
    panic: LoadWindow = LoadWindow()
    panics_since_s: float | None = None
    most_in_panic: int = 0
    zero_since_s: float | None = None
    """Time since which the last replica is not needed."""


class KnativeKpa:
    name: ClassVar[str] = Knative.name
    memory_type: ClassVar[type[KnativeMemory]] = KnativeMemory
    sees_replicas: ClassVar[bool] = False
    reads_slo: ClassVar[bool] = False
    wakes_at_once: ClassVar[bool] = True

    def __init__(self, parameters: Knative | None = None) -> None:
        self._parameters = parameters or Knative()
        self.interval_s = self._parameters.interval_s

    def decide(
        self, settings: ScalingSettings, signals: Signals, memory: KnativeMemory
    ) -> tuple[Decision, KnativeMemory]:
        before, at_s, concurrency = signals.fleet.wanted, signals.at_s, signals.num_requests
        desired, message = 1, "a request finds no replica"
        if is_due(at_s, memory.decided_at_s, self.interval_s):
            memory, desired = self._desired(signals, self._sampled(memory, at_s, concurrency))
            message = f"a mean concurrency of {memory.stable.mean:.1f}, {self._parameters.target:g} for each replica"
        elif before or not concurrency:
            return decided(before, within(settings, before), "between two decisions"), memory
        memory, replicas = self._kept(memory, at_s, before, desired)
        return decided(before, within(settings, replicas), message), memory

    def _sampled(self, memory: KnativeMemory, at_s: float, concurrency: int) -> KnativeMemory:
        stable_s = self._parameters.stable_window_s
        stable = memory.stable.add(at_s, concurrency, stable_s)
        panic = memory.panic.add(at_s, concurrency, stable_s * self._parameters.panic_window_share)
        return msgspec.structs.replace(memory, stable=stable, panic=panic)

    def _desired(self, signals: Signals, memory: KnativeMemory) -> tuple[KnativeMemory, int]:
        parameters, at_s, ready = self._parameters, signals.at_s, max(1, signals.fleet.ready)
        if memory.decided_at_s is None and signals.fleet.ready > 1:
            # Without a history, keep the present replicas.
            memory = msgspec.structs.replace(memory, panics_since_s=at_s, most_in_panic=signals.fleet.ready)
        most, least = math.ceil(parameters.most_up * ready), math.floor(ready / parameters.most_down)
        stable, surge = (math.ceil(window.mean / parameters.target) for window in (memory.stable, memory.panic))
        memory = self._panic_or_calm(memory, at_s, surge / ready >= parameters.panic_threshold)
        memory = msgspec.structs.replace(memory, decided_at_s=at_s)
        desired = min(most, max(least, stable))
        if memory.panics_since_s is None:
            return memory, desired
        highest = max(memory.most_in_panic, desired, min(most, max(least, surge)))
        return msgspec.structs.replace(memory, most_in_panic=highest), highest

    def _panic_or_calm(self, memory: KnativeMemory, at_s: float, surges: bool) -> KnativeMemory:
        if surges:
            return msgspec.structs.replace(memory, panics_since_s=at_s)
        if memory.panics_since_s is not None and at_s - memory.panics_since_s > self._parameters.stable_window_s:
            return msgspec.structs.replace(memory, panics_since_s=None, most_in_panic=0)
        return memory

    def _kept(self, memory: KnativeMemory, at_s: float, before: int, desired: int) -> tuple[KnativeMemory, int]:
        """Keep the last replica for the grace period."""
        if desired > 0 or before == 0:
            return msgspec.structs.replace(memory, zero_since_s=None), desired
        zero_since_s = at_s if memory.zero_since_s is None else memory.zero_since_s
        replicas = 0 if at_s - zero_since_s >= self._parameters.grace_s else 1
        return msgspec.structs.replace(memory, zero_since_s=zero_since_s), replicas
