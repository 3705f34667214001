"""How fast a HorizontalPodAutoscaler may change replicas: stabilization windows, and rules of how many in a period.

Source: Kubernetes, autoscaling/v2, https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/
(scaling policies, stabilization window, default behavior), and enhancement 853 (07a4b88 of
https://github.com/kubernetes/enhancements). Of several rules the one that allows most counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pagemill_simulator.scaling.policy import Bounds


class Rule(NamedTuple):
    kind: Literal["pods", "percent"]
    value: float
    """That may come or go within the period."""
    period_s: float


class Direction(NamedTuple):
    window_s: float
    """Of the wishes in it the most careful one counts."""
    rules: tuple[Rule, ...]


UP = Direction(0.0, (Rule("percent", 100.0, 15.0), Rule("pods", 4.0, 15.0)))
DOWN = Direction(300.0, (Rule("percent", 100.0, 15.0),))


class Behavior:
    def __init__(self, up: Direction = UP, down: Direction = DOWN) -> None:
        self._up, self._down = up, down
        self._wishes: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()

    def limit(self, at_s: float, current: int, desired: int, bounds: Bounds) -> int:
        """Replicas from now on, given how many the metrics ask for; `bounds` of this autoscaler."""
        if not self._wishes:
            self._wishes.append((at_s, current))
        calm = self._stabilized(at_s, current, desired)
        self._wishes.append((at_s, desired))
        replicas = self._slowed(at_s, current, calm)
        replicas = min(bounds.max_replicas, max(bounds.min_replicas, replicas))
        if replicas != current:
            self._changes.append((at_s, replicas - current))
        self._forget(at_s)
        return replicas

    def _stabilized(self, at_s: float, current: int, desired: int) -> int:
        lowest = min([desired, *(wish for then, wish in self._wishes if then > at_s - self._up.window_s)])
        highest = max([desired, *(wish for then, wish in self._wishes if then > at_s - self._down.window_s)])
        return min(max(current, lowest), highest)

    def _slowed(self, at_s: float, current: int, replicas: int) -> int:
        if replicas > current:
            limits = [_raised(self._at_begin(at_s, current, rule.period_s), rule) for rule in self._up.rules]
            return min(replicas, max([current, *limits]))
        if replicas < current:
            limits = [_lowered(self._at_begin(at_s, current, rule.period_s), rule) for rule in self._down.rules]
            return max(replicas, min([current, *limits]))
        return replicas

    def _at_begin(self, at_s: float, current: int, period_s: float) -> int:
        """Replicas when the period began."""
        return current - sum(delta for then, delta in self._changes if then > at_s - period_s)

    def _forget(self, at_s: float) -> None:
        longest_s = max(self._up.window_s, self._down.window_s)
        while len(self._wishes) > 1 and self._wishes[0][0] <= at_s - longest_s:
            self._wishes.popleft()
        period_s = _longest_period_s(self._up.rules + self._down.rules)
        while self._changes and self._changes[0][0] <= at_s - period_s:
            self._changes.popleft()


def _raised(begin: int, rule: Rule) -> int:
    return math.ceil(begin + rule.value if rule.kind == "pods" else begin * (1 + rule.value / 100))


def _lowered(begin: int, rule: Rule) -> int:
    return math.trunc(begin - rule.value if rule.kind == "pods" else begin * (1 - rule.value / 100))


def _longest_period_s(rules: Sequence[Rule]) -> float:
    return max((rule.period_s for rule in rules), default=0.0)
