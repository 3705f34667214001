"""No autoscaling: as many replicas as somebody ordered."""

from __future__ import annotations

from typing import ClassVar

from pagemill_simulator.parameters import Count, Parameters
from pagemill_simulator.scaling.measured import within
from pagemill_simulator.scaling.policy import Bounds, Seen


class Fixed(Parameters, frozen=True, kw_only=True):
    """The same number all the time."""

    name: ClassVar[str] = "fixed"
    replicas: Count | None = None
    """None: what there are at the beginning."""

    def policy(self, bounds: Bounds) -> FixedReplicas:
        return FixedReplicas(bounds, self)


class FixedReplicas:
    name = Fixed.name
    interval_s = 60.0
    wakes_at_once = False

    def __init__(self, bounds: Bounds, parameters: Fixed | None = None) -> None:
        self._bounds = bounds
        self._replicas = (parameters or Fixed()).replicas

    def decide(self, seen: Seen) -> int:
        return within(self._bounds, seen.wanted if self._replicas is None else self._replicas)
