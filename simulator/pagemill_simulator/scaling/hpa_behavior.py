"""Limits how fast a HorizontalPodAutoscaler changes replicas: stabilization windows, and rules per period.

Source: Kubernetes, autoscaling/v2, https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/
(scaling policies, stabilization window, default behavior), and enhancement 853 (07a4b88 of
https://github.com/kubernetes/enhancements). Of several rules the one that allows the largest change counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from pagemill_simulator.scaling.policy import ReplicaBounds
from pagemill_simulator.scaling.rival import LoadSample


class HpaRule(NamedTuple):
    kind: Literal["pods", "percent"]
    value: float
    """Replicas, or percent of them, that may be added or removed within the period."""
    period_s: float


class HpaDirection(NamedTuple):
    window_s: float
    """The most cautious recommendation within the window counts."""
    rules: tuple[HpaRule, ...]


UP = HpaDirection(0.0, (HpaRule("percent", 100.0, 15.0), HpaRule("pods", 4.0, 15.0)))
DOWN = HpaDirection(300.0, (HpaRule("percent", 100.0, 15.0),))


class BehaviorMemory(msgspec.Struct, frozen=True):
    recommendations: tuple[LoadSample, ...] = ()
    """What the metrics have asked for."""
    changes: tuple[LoadSample, ...] = ()


class HpaBehavior:
    def __init__(self, up: HpaDirection = UP, down: HpaDirection = DOWN) -> None:
        self._up, self._down = up, down

    def limit(
        self, memory: BehaviorMemory, at_s: float, current: int, desired: int, bounds: ReplicaBounds
    ) -> tuple[int, BehaviorMemory]:
        """Return the new replicas, given the number that the metrics ask for; `bounds` are this autoscaler's."""
        recommendations = memory.recommendations or (LoadSample(at_s, current),)
        calm = self._stabilized(recommendations, at_s, current, desired)
        recommendations = (*recommendations, LoadSample(at_s, desired))
        replicas = self._slowed(memory.changes, at_s, current, calm)
        replicas = min(bounds.max_replicas, max(bounds.min_replicas, replicas))
        changes = memory.changes
        if replicas != current:
            changes = (*changes, LoadSample(at_s, replicas - current))
        return replicas, self._kept(recommendations, changes, at_s)

    def _stabilized(self, recommendations: Sequence[LoadSample], at_s: float, current: int, desired: int) -> int:
        lowest = min([desired, *_values(recommendations, at_s - self._up.window_s)])
        highest = max([desired, *_values(recommendations, at_s - self._down.window_s)])
        return min(max(current, lowest), highest)

    def _slowed(self, changes: Sequence[LoadSample], at_s: float, current: int, replicas: int) -> int:
        if replicas > current:
            limits = [_raised(_at_begin(changes, at_s, current, rule.period_s), rule) for rule in self._up.rules]
            return min(replicas, max([current, *limits]))
        if replicas < current:
            limits = [_lowered(_at_begin(changes, at_s, current, rule.period_s), rule) for rule in self._down.rules]
            return max(replicas, min([current, *limits]))
        return replicas

    def _kept(
        self, recommendations: Sequence[LoadSample], changes: Sequence[LoadSample], at_s: float
    ) -> BehaviorMemory:
        longest_s = max(self._up.window_s, self._down.window_s)
        *older, latest = recommendations
        period_s = _longest_period_s(self._up.rules + self._down.rules)
        return BehaviorMemory(
            (*(each for each in older if each.at_s > at_s - longest_s), latest),
            tuple(each for each in changes if each.at_s > at_s - period_s),
        )


def _values(samples: Sequence[LoadSample], since_s: float) -> list[int]:
    return [round(each.value) for each in samples if each.at_s > since_s]


def _at_begin(changes: Sequence[LoadSample], at_s: float, current: int, period_s: float) -> int:
    """Return the replicas at the beginning of the period."""
    return current - sum(_values(changes, at_s - period_s))


def _raised(begin: int, rule: HpaRule) -> int:
    return math.ceil(begin + rule.value if rule.kind == "pods" else begin * (1 + rule.value / 100))


def _lowered(begin: int, rule: HpaRule) -> int:
    return math.trunc(begin - rule.value if rule.kind == "pods" else begin * (1 - rule.value / 100))


def _longest_period_s(rules: Sequence[HpaRule]) -> float:
    return max((rule.period_s for rule in rules), default=0.0)
