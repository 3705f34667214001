"""Kubernetes's HorizontalPodAutoscaler on the engines' queues: replicas in proportion to metric over target.

Source: Kubernetes, autoscaling/v2, https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/
(algorithm details); the target of 5 waiting requests is that of the vLLM production-stack,
https://docs.vllm.ai/projects/production-stack/en/latest/use_cases/autoscaling-keda.html. With a pods metric, pods
without a value count as idle if the rest asks for more replicas, and as on target if it asks for fewer; a change that
this would reverse is not made. The minimum is one replica, since the autoscaler stops at zero.

`keda-epp` is the same autoscaler on external metrics, as llm-d's guide configures it through KEDA (llm-d 0.9,
https://github.com/llm-d/llm-d, guides/workload-autoscaling): per replica one request that waits in the gateway's flow
control, or sixteen running ones, and no step up before all recommendations of five minutes ask for it, because these
metrics do not include starting pods.
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
from pagemill_simulator.scaling.hpa_behavior import DOWN, UP, BehaviorMemory, HpaBehavior
from pagemill_simulator.scaling.policy import ReplicaBounds
from pagemill_simulator.scaling.rival import engines, is_due, num_waiting, within


class Hpa(Parameters, frozen=True, kw_only=True):
    """Scales by waiting requests per engine, as a pods metric."""

    name: ClassVar[str] = "hpa"
    target_waiting: Positive = 5.0
    """Mean number of requests that wait in an engine."""
    interval_s: Positive = 15.0
    """Seconds between decisions."""
    tolerance: NotNegative = 0.1
    """Distance of the ratio from 1 within which nothing changes."""
    up_window_s: NotNegative = UP.window_s
    """Stabilization window for more replicas."""
    down_window_s: NotNegative = DOWN.window_s
    """Stabilization window for fewer replicas."""

    def policy(self) -> HpaOnQueue:
        return HpaOnQueue(self)


class KedaEpp(Parameters, frozen=True, kw_only=True):
    """Scales by all waiting and running requests, as external metrics."""

    name: ClassVar[str] = "keda-epp"
    target_held: Positive = 1.0
    """Requests that wait in the gateway, per replica."""
    target_running: Positive = 16.0
    """Requests in engines, per replica."""
    interval_s: Positive = 15.0
    """Seconds between decisions."""
    tolerance: NotNegative = 0.1
    """Distance of the ratio from 1 within which nothing changes."""
    up_window_s: NotNegative = 300.0
    """Stabilization window for more replicas."""
    down_window_s: NotNegative = 300.0
    """Stabilization window for fewer replicas."""

    def policy(self) -> KedaOnEpp:
        return KedaOnEpp(self)


class HpaMemory(msgspec.Struct, frozen=True):
    decided_at_s: float | None = None
    behavior: BehaviorMemory = BehaviorMemory()


class _Autoscaler:
    """The common part of both autoscalers, from the replicas that their metrics require to the decision."""

    memory_type: ClassVar[type[HpaMemory]] = HpaMemory
    wakes_at_once: ClassVar[bool] = False

    def __init__(self, parameters: Hpa | KedaEpp) -> None:
        self.interval_s = parameters.interval_s
        self._behavior = HpaBehavior(
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
        bounds = ReplicaBounds(max(1, settings.min_replicas), max(1, settings.max_replicas))
        replicas, behavior = self._behavior.limit(memory.behavior, at_s, current, desired, bounds)
        message = f"the metrics ask for {desired}"
        return decided(before, within(settings, replicas, least=1), message), HpaMemory(at_s, behavior)

    def _desired(self, signals: Signals) -> int | None:
        """Return the replicas that the metrics ask for, or None if they are unknown."""
        raise NotImplementedError


class HpaOnQueue(_Autoscaler):
    name: ClassVar[str] = Hpa.name
    sees_replicas: ClassVar[bool] = True
    reads_slo: ClassVar[bool] = False

    def __init__(self, parameters: Hpa | None = None) -> None:
        self._parameters = parameters or Hpa()
        super().__init__(self._parameters)

    def _desired(self, signals: Signals) -> int | None:
        waiting, wanted = [num_waiting(engine, signals) for engine in engines(signals)], signals.fleet.wanted
        if not waiting:
            return None
        num_silent = max(0, wanted - len(waiting))
        target, tolerance = self._parameters.target_waiting, self._parameters.tolerance
        return pods_metric(math.fsum(waiting), len(waiting), num_silent, target, max(1, wanted), tolerance)


class KedaOnEpp(_Autoscaler):
    name: ClassVar[str] = KedaEpp.name
    sees_replicas: ClassVar[bool] = False
    reads_slo: ClassVar[bool] = False

    def __init__(self, parameters: KedaEpp | None = None) -> None:
        self._parameters = parameters or KedaEpp()
        super().__init__(self._parameters)

    def _desired(self, signals: Signals) -> int | None:
        parameters, current = self._parameters, max(1, signals.fleet.wanted)
        num_held = signals.queue.num_requests
        running = signals.num_requests - num_held
        held = external_metric(num_held, parameters.target_held, current, parameters.tolerance)
        return max(held, external_metric(running, parameters.target_running, current, parameters.tolerance))
