"""The HorizontalPodAutoscaler of Kubernetes on the queues of the engines: replicas in the ratio of metric to target.

Source: Kubernetes, autoscaling/v2, https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/
(algorithm details); the target of 5 waiting requests is that of the vLLM production-stack,
https://docs.vllm.ai/projects/production-stack/en/latest/use_cases/autoscaling-keda.html. A pods metric: pods without
one count as idle when the rest asks for more, and as on target when it asks for fewer; a step that turns the direction
round is not taken. It goes no lower than one replica, as the autoscaler stops at none.

`keda-epp` is the same autoscaler on external metrics, as llm-d's guide sets it up through KEDA (llm-d 0.9,
https://github.com/llm-d/llm-d, guides/workload-autoscaling): one request held by the gateway's flow control, or sixteen
running, to a replica, and no step up before all wishes of five minutes ask for it, as pods that start are not known to
these metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from pagemill_simulator.parameters import NotNegative, Parameters, Positive
from pagemill_simulator.scaling.hpa_behavior import DOWN, UP, Behavior
from pagemill_simulator.scaling.measured import Timer, engines, within
from pagemill_simulator.scaling.policy import Bounds, Seen


class Hpa(Parameters, frozen=True, kw_only=True):
    """Waiting requests of each engine, as a pods metric."""

    name: ClassVar[str] = "hpa"
    target_waiting: Positive = 5.0
    """Requests that wait in an engine, mean."""
    interval_s: Positive = 15.0
    """Between decisions."""
    tolerance: NotNegative = 0.1
    """Of the ratio to 1, within which nothing is done."""
    up_window_s: NotNegative = UP.window_s
    """Stabilization of more replicas."""
    down_window_s: NotNegative = DOWN.window_s
    """Stabilization of fewer."""

    def policy(self, bounds: Bounds) -> HpaOnQueue:
        return HpaOnQueue(bounds, self)


class KedaEpp(Parameters, frozen=True, kw_only=True):
    """Held and running requests of all together, as external metrics."""

    name: ClassVar[str] = "keda-epp"
    target_held: Positive = 1.0
    """Requests that wait in the gateway, to a replica."""
    target_running: Positive = 16.0
    """Requests in engines, to a replica."""
    interval_s: Positive = 15.0
    """Between decisions."""
    tolerance: NotNegative = 0.1
    """Of the ratio to 1, within which nothing is done."""
    up_window_s: NotNegative = 300.0
    """Stabilization of more replicas."""
    down_window_s: NotNegative = 300.0
    """Stabilization of fewer."""

    def policy(self, bounds: Bounds) -> KedaOnEpp:
        return KedaOnEpp(bounds, self)


class _Autoscaler:
    """What both do with the replicas that their metrics ask for."""

    wakes_at_once = False

    def __init__(self, bounds: Bounds, parameters: Hpa | KedaEpp) -> None:
        self._bounds = Bounds(max(1, bounds.min_replicas), max(1, bounds.max_replicas))
        self._limits = bounds
        self.interval_s = parameters.interval_s
        self._timer = Timer(self.interval_s)
        self._behavior = Behavior(
            UP._replace(window_s=parameters.up_window_s), DOWN._replace(window_s=parameters.down_window_s)
        )

    def _apply(self, seen: Seen, desired: int | None) -> int:
        """None: the metrics are unknown."""
        current = within(self._limits, seen.wanted, least=1)
        if desired is None:
            return current
        return within(self._limits, self._behavior.limit(seen.at_s, current, desired, self._bounds), least=1)


class HpaOnQueue(_Autoscaler):
    name = Hpa.name

    def __init__(self, bounds: Bounds, parameters: Hpa | None = None) -> None:
        self._parameters = parameters or Hpa()
        super().__init__(bounds, self._parameters)

    def decide(self, seen: Seen) -> int:
        if not self._timer.is_due(seen.at_s):
            return self._apply(seen, None)
        waiting = [engine.num_waiting for engine in engines(seen)]
        num_silent = max(0, seen.wanted - len(waiting))
        target, tolerance = self._parameters.target_waiting, self._parameters.tolerance
        return self._apply(seen, pods_metric(waiting, num_silent, target, max(1, seen.wanted), tolerance))


class KedaOnEpp(_Autoscaler):
    name = KedaEpp.name

    def __init__(self, bounds: Bounds, parameters: KedaEpp | None = None) -> None:
        self._parameters = parameters or KedaEpp()
        super().__init__(bounds, self._parameters)

    def decide(self, seen: Seen) -> int:
        if not self._timer.is_due(seen.at_s):
            return self._apply(seen, None)
        parameters, current = self._parameters, max(1, seen.wanted)
        running = seen.concurrency - seen.num_held
        held = external_metric(seen.num_held, parameters.target_held, current, parameters.tolerance)
        return self._apply(
            seen, max(held, external_metric(running, parameters.target_running, current, parameters.tolerance))
        )


def pods_metric(values: Sequence[float], num_silent: int, target: float, current: int, tolerance: float) -> int | None:
    """Replicas that put the mean of the pods on the target; `num_silent` pods have no metric. None: nobody has one."""
    if not values:
        return None
    ratio = math.fsum(values) / len(values) / target
    if not num_silent:
        return current if abs(1 - ratio) <= tolerance else math.ceil(ratio * len(values))
    assumed = target if ratio < 1 else 0.0
    count = len(values) + num_silent
    careful = (math.fsum(values) + assumed * num_silent) / count / target
    turned = (ratio < 1 < careful) or (careful < 1 < ratio)
    if turned or abs(1 - careful) <= tolerance:
        return current
    replicas = math.ceil(careful * count)
    # The pods that were counted may be others than those that are wanted.
    against = (careful < 1 and replicas > current) or (careful > 1 and replicas < current)
    return current if against else replicas


def external_metric(total: float, target: float, current: int, tolerance: float) -> int:
    """Replicas that share the total at the target each."""
    return current if abs(1 - total / (target * current)) <= tolerance else math.ceil(total / target)
