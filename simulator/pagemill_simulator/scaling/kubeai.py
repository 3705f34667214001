"""KubeAI: the mean of active requests over ten minutes, divided by the requests that a replica is meant for.

Source: KubeAI chart 0.22.1, https://www.kubeai.org/concepts/autoscaling and /how-to/configure-autoscaling, defaults of
`modelAutoscaling` and of the `Model` resource. The mean begins with zeros. A lower number counts only after so many
lower ones in a row as fit into the delay. The first request at zero orders one replica at once.
"""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar

from pagemill_simulator.parameters import NotNegative, Parameters, Positive
from pagemill_simulator.scaling.measured import Timer, within
from pagemill_simulator.scaling.policy import Bounds, Seen


class KubeAi(Parameters, frozen=True, kw_only=True):
    """Mean of active requests over a long window."""

    name: ClassVar[str] = "kubeai"
    target_requests: Positive = 100.0
    """`targetRequests`: active requests that a replica is meant for."""
    interval_s: Positive = 10.0
    """Between decisions."""
    window_s: Positive = 600.0
    """`timeWindow` of the mean."""
    scale_down_delay_s: NotNegative = 30.0
    """`scaleDownDelaySeconds`."""

    def policy(self, bounds: Bounds) -> KubeAiMean:
        return KubeAiMean(bounds, self)


class KubeAiMean:
    name = KubeAi.name
    wakes_at_once = True

    def __init__(self, bounds: Bounds, parameters: KubeAi | None = None) -> None:
        self._bounds = bounds
        self._parameters = parameters or KubeAi()
        self.interval_s = self._parameters.interval_s
        length = max(1, math.ceil(self._parameters.window_s / self.interval_s))
        self._active = deque([0] * length, maxlen=length)
        self._needed_lower = math.ceil(self._parameters.scale_down_delay_s / self.interval_s)
        self._num_lower = 0
        self._timer = Timer(self.interval_s)

    def decide(self, seen: Seen) -> int:
        wanted = within(self._bounds, seen.wanted)
        if not self._timer.is_due(seen.at_s):
            return within(self._bounds, max(wanted, seen.concurrency > 0))
        self._active.append(seen.concurrency)
        mean = sum(self._active) / len(self._active)
        desired = within(self._bounds, math.ceil(mean / self._parameters.target_requests))
        if desired >= wanted:
            self._num_lower = 0
            return desired
        if self._num_lower < self._needed_lower:
            self._num_lower += 1
            return wanted
        return desired
