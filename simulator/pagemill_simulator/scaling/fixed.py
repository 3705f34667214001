"""No autoscaling: a fixed number of replicas."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from pagemill_operator.autoscaler.decision import Decision, decided
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Signals
from pagemill_simulator.parameters import Count, Parameters
from pagemill_simulator.scaling.rival import within


class Fixed(Parameters, frozen=True, kw_only=True):
    """Keeps the same number of replicas."""

    name: ClassVar[str] = "fixed"
    replicas: Count | None = None
    """None: the initial number of replicas."""

    def policy(self) -> FixedReplicas:
        return FixedReplicas(self)


class NoMemory(msgspec.Struct, frozen=True):
    pass


class FixedReplicas:
    name: ClassVar[str] = Fixed.name
    memory_type: ClassVar[type[NoMemory]] = NoMemory
    sees_replicas: ClassVar[bool] = False
    reads_slo: ClassVar[bool] = False
    interval_s: ClassVar[float] = 60.0
    wakes_at_once: ClassVar[bool] = False

    def __init__(self, parameters: Fixed | None = None) -> None:
        self._replicas = (parameters or Fixed()).replicas

    def decide(self, settings: ScalingSettings, signals: Signals, memory: NoMemory) -> tuple[Decision, NoMemory]:
        wanted = signals.fleet.wanted
        replicas = within(settings, wanted if self._replicas is None else self._replicas)
        return decided(wanted, replicas, "a fixed number"), memory
