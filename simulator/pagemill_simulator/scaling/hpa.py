"""The HorizontalPodAutoscaler of Kubernetes on the queues of the engines: replicas in the ratio of metric to target.

Source: Kubernetes, autoscaling/v2, https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/
(algorithm details); the target of 5 waiting requests is that of the vLLM production-stack,
https://docs.vllm.ai/projects/production-stack/en/latest/use_cases/autoscaling-keda.html. A pods metric: pods without
one count as idle when the rest asks for more, and as on target when it asks for fewer; a step that turns the direction
round is not taken. It goes no lower than one replica, as the autoscaler stops at none.

`keda-epp` is the same autoscaler on external metrics, as llm-d's guide sets it up through KEDA (llm-d 0.9,
https://github.com/llm-d/llm-d, guides/workload-autoscaling): one request held by the gateway's flow control, or sixteen
running, to a replica, and no step up before all recommendations of five minutes ask for it, as pods that start are not
known to these metrics.
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from pagemill_operator.autoscaler.decision import Decision, decided
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Signals
from pagemill_operator.autoscaler.target_tracking import external_metric, pods_metric
from pagemill_simulator.parameters import NotNegative, Parameters, Positive
from pagemill_simulator.scaling.hpa_behavior import DOWN, UP, Behavior, BehaviorMemory
from pagemill_simulator.scaling.policy import Bounds
from pagemill_simulator.scaling.rival import engines, is_due, within


class Hpa(Parameters, frozen=True, kw_only=True):
    """Waiting requests of each engine, as a pods metric."""

    name: ClassVar[str] = "hpa"
    target_waiting: Positive = 5.0
    """Requests that wait in an engine, mean."""
    interval_s: Positive = 15.0
    """Between decisions."""
    tolerance: NotNegative = 0.1
    """The distance of the ratio from 1 within which nothing is done."""
    up_window_s: NotNegative = UP.window_s
    """Stabilization of more replicas."""
    down_window_s: NotNegative = DOWN.window_s
    """Stabilization of fewer."""

    def policy(self) -> HpaOnQueue:
        return HpaOnQueue(self)


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
    """The distance of the ratio from 1 within which nothing is done."""
    up_window_s: NotNegative = 300.0
    """Stabilization of more replicas."""
    down_window_s: NotNegative = 300.0
    """Stabilization of fewer."""

    def policy(self) -> KedaOnEpp:
        return KedaOnEpp(self)


class HpaMemory(msgspec.Struct, frozen=True):
    decided_at_s: float | None = None
    behavior: BehaviorMemory = BehaviorMemory()


class _Autoscaler:
    """What both do with the replicas that their metrics ask for."""

    memory_type: ClassVar[type[HpaMemory]] = HpaMemory
    wakes_at_once: ClassVar[bool] = False

    def __init__(self, parameters: Hpa | KedaEpp) -> None:
        self.interval_s = parameters.interval_s
        self._behavior = Behavior(
            UP._replace(window_s=parameters.up_window_s), DOWN._replace(window_s=parameters.down_window_s)
        )

    def decide(self, settings: ScalingSettings, signals: Signals, memory: HpaMemory) -> tuple[Decision, HpaMemory]:
        before, at_s = signals.fleet.wanted, signals.at_s
        current = within(settings, before, least=1)
        if not is_due(at_s, memory.decided_at_s, self.interval_s):
            return decided(before, current, "between two decisions"), memory
        desired = self._desired(signals)
        if desired is None:
            return decided(before, current, "no engine has metrics"), HpaMemory(at_s, memory.behavior)
        bounds = Bounds(max(1, settings.min_replicas), max(1, settings.max_replicas))
        replicas, behavior = self._behavior.limit(memory.behavior, at_s, current, desired, bounds)
        message = f"the metrics ask for {desired}"
        return decided(before, within(settings, replicas, least=1), message), HpaMemory(at_s, behavior)

    def _desired(self, signals: Signals) -> int | None:
        """None: the metrics are unknown."""
        raise NotImplementedError


class HpaOnQueue(_Autoscaler):
    name: ClassVar[str] = Hpa.name
    sees_replicas: ClassVar[bool] = True

    def __init__(self, parameters: Hpa | None = None) -> None:
        self._parameters = parameters or Hpa()
        super().__init__(self._parameters)

    def _desired(self, signals: Signals) -> int | None:
        waiting, wanted = [engine.num_waiting for engine in engines(signals)], signals.fleet.wanted
        if not waiting:
            return None
        num_silent = max(0, wanted - len(waiting))
        target, tolerance = self._parameters.target_waiting, self._parameters.tolerance
        return pods_metric(math.fsum(waiting), len(waiting), num_silent, target, max(1, wanted), tolerance)


class KedaOnEpp(_Autoscaler):
    name: ClassVar[str] = KedaEpp.name
    sees_replicas: ClassVar[bool] = False

    def __init__(self, parameters: KedaEpp | None = None) -> None:
        self._parameters = parameters or KedaEpp()
        super().__init__(self._parameters)

    def _desired(self, signals: Signals) -> int | None:
        parameters, current = self._parameters, max(1, signals.fleet.wanted)
        num_held = signals.queue.num_requests
        running = signals.num_requests - num_held
        held = external_metric(num_held, parameters.target_held, current, parameters.tolerance)
        return max(held, external_metric(running, parameters.target_running, current, parameters.tolerance))
