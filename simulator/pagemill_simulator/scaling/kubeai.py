"""KubeAI: the mean of active requests over ten minutes, divided by the target of requests per replica.

Source: KubeAI chart 0.22.1, https://www.kubeai.org/concepts/autoscaling and /how-to/configure-autoscaling, defaults of
`modelAutoscaling` and of the `Model` resource. The mean begins with zeros. A lower number counts only after as many
consecutive lower ones as fit into the delay. The first request at zero orders one replica at once.
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from pagemill_operator.autoscaler.decision import Decision, decided
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Signals
from pagemill_simulator.parameters import NotNegative, Parameters, Positive
from pagemill_simulator.scaling.rival import is_due, within


class KubeAi(Parameters, frozen=True, kw_only=True):
    """Scales by the mean of active requests over a long window."""

    name: ClassVar[str] = "kubeai"
    target_requests: Positive = 100.0
    """`targetRequests`: active requests per replica."""
    interval_s: Positive = 10.0
    """Seconds between decisions."""
    window_s: Positive = 600.0
    """`timeWindow` of the mean."""
    scale_down_delay_s: NotNegative = 30.0
    """`scaleDownDelaySeconds`."""

    def policy(self) -> KubeAiMean:
        return KubeAiMean(self)


class KubeAiMemory(msgspec.Struct, frozen=True):
    active: tuple[int, ...] = ()
    """Active requests at the latest decisions; those before the first one count as zero."""
    num_lower: int = 0
    """Consecutive decisions that asked for fewer replicas."""
    decided_at_s: float | None = None


class KubeAiMean:
    name: ClassVar[str] = KubeAi.name
    memory_type: ClassVar[type[KubeAiMemory]] = KubeAiMemory
    sees_replicas: ClassVar[bool] = False
    reads_slo: ClassVar[bool] = False
    wakes_at_once: ClassVar[bool] = True

    def __init__(self, parameters: KubeAi | None = None) -> None:
        self._parameters = parameters or KubeAi()
        self.interval_s = self._parameters.interval_s
        self._length = max(1, math.ceil(self._parameters.window_s / self.interval_s))
        self._needed_lower = math.ceil(self._parameters.scale_down_delay_s / self.interval_s)

    def decide(
        self, settings: ScalingSettings, signals: Signals, memory: KubeAiMemory
    ) -> tuple[Decision, KubeAiMemory]:
        before, active = signals.fleet.wanted, signals.num_requests
        if not is_due(signals.at_s, memory.decided_at_s, self.interval_s):
            replicas = within(settings, max(within(settings, before), active > 0))
            return decided(before, replicas, f"{active} active requests"), memory
        samples = (*memory.active, active)[-self._length :]
        mean = sum(samples) / self._length
        replicas, num_lower = self._delayed(settings, before, mean, memory.num_lower)
        message = f"a mean of {mean:.1f} active requests, {self._parameters.target_requests:g} for each replica"
        return decided(before, replicas, message), KubeAiMemory(samples, num_lower, signals.at_s)

    def _delayed(self, settings: ScalingSettings, before: int, mean: float, num_lower: int) -> tuple[int, int]:
        """Return the replicas and the count of lower decisions; a lower number must recur for the whole delay."""
        wanted = within(settings, before)
        desired = within(settings, math.ceil(mean / self._parameters.target_requests))
        if desired >= wanted:
            return desired, 0
        return (wanted, num_lower + 1) if num_lower < self._needed_lower else (desired, num_lower)
