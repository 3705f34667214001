"""Knative's pod autoscaler (KPA): concurrency over a stable window of a minute, over a panic window in a surge.

Source: https://knative.dev/docs/serving/autoscaling/kpa-specific/ (11fd424 of https://github.com/knative/docs) and
docs/scaling/SYSTEM.md of https://github.com/knative/serving (254c92c), defaults of `config-autoscaler`: every two
seconds, the requests in the system divided by the target, from both windows; a panic begins when the short one asks for
twice the ready replicas, lasts until that was not so for a stable window, and only adds; 1000 times as many replicas at
most, half as many at least. The last replica goes after the scale-to-zero grace period; a request at zero wakes it at
once.
"""

from __future__ import annotations

import math
from typing import ClassVar

from pagemill_simulator.parameters import Factor, NotNegative, Parameters, Positive, Share
from pagemill_simulator.scaling.measured import Timer, Window, within
from pagemill_simulator.scaling.policy import Bounds, Seen


class Knative(Parameters, frozen=True, kw_only=True):
    """Concurrency, with a panic window."""

    name: ClassVar[str] = "knative"
    target_concurrency: Positive = 100.0
    """`container-concurrency-target-default`: requests in a replica."""
    target_utilization: Share = 0.7
    """`container-concurrency-target-percentage`: the share of that which is aimed at."""
    interval_s: Positive = 2.0
    """`tick-interval`: between decisions."""
    stable_window_s: Positive = 60.0
    """`stable-window`."""
    panic_window_share: Share = 0.1
    """`panic-window-percentage`."""
    panic_threshold: Factor = 2.0
    """`panic-threshold-percentage`: times what the ready replicas are meant for."""
    most_up: Factor = 1000.0
    """`max-scale-up-rate`."""
    most_down: Factor = 2.0
    """`max-scale-down-rate`."""
    grace_s: NotNegative = 30.0
    """`scale-to-zero-grace-period`."""

    @property
    def target(self) -> float:
        """A replica's; no less than one hundredth of a request."""
        return max(0.01, self.target_concurrency * self.target_utilization)

    def policy(self, bounds: Bounds) -> KnativeKpa:
        return KnativeKpa(bounds, self)


class KnativeKpa:
    name = Knative.name
    wakes_at_once = True

    def __init__(self, bounds: Bounds, parameters: Knative | None = None) -> None:
        self._bounds = bounds
        self._parameters = parameters or Knative()
        self.interval_s = self._parameters.interval_s
        self._timer = Timer(self.interval_s)
        self._stable = Window(self._parameters.stable_window_s)
        self._panic = Window(self._parameters.stable_window_s * self._parameters.panic_window_share)
        self._panics_since_s: float | None = None
        self._most_in_panic = 0
        self._is_first = True
        self._zero_since_s: float | None = None

    def decide(self, seen: Seen) -> int:
        is_due = self._timer.is_due(seen.at_s)
        if is_due:
            self._stable.add(seen.at_s, seen.concurrency)
            self._panic.add(seen.at_s, seen.concurrency)
        if not is_due and not (seen.wanted == 0 and seen.concurrency):
            return within(self._bounds, seen.wanted)
        desired = self._desired(seen) if is_due else 1
        return within(self._bounds, self._kept(seen, desired))

    def _desired(self, seen: Seen) -> int:
        parameters, ready = self._parameters, max(1, seen.ready)
        if self._is_first and seen.ready > 1:
            # Without a history it holds what it finds.
            self._panics_since_s, self._most_in_panic = seen.at_s, seen.ready
        self._is_first = False
        most, least = math.ceil(parameters.most_up * ready), math.floor(ready / parameters.most_down)
        stable, surge = (math.ceil(window.mean / parameters.target) for window in (self._stable, self._panic))
        self._panic_or_calm(seen.at_s, surge / ready >= parameters.panic_threshold)
        desired = min(most, max(least, stable))
        if self._panics_since_s is None:
            return desired
        self._most_in_panic = max(self._most_in_panic, desired, min(most, max(least, surge)))
        return self._most_in_panic

    def _panic_or_calm(self, at_s: float, surges: bool) -> None:
        if surges:
            self._panics_since_s = at_s
        elif self._panics_since_s is not None and at_s - self._panics_since_s > self._parameters.stable_window_s:
            self._panics_since_s, self._most_in_panic = None, 0

    def _kept(self, seen: Seen, desired: int) -> int:
        """The last replica stays for the grace period."""
        if desired > 0 or seen.wanted == 0:
            self._zero_since_s = None
            return desired
        self._zero_since_s = seen.at_s if self._zero_since_s is None else self._zero_since_s
        return 0 if seen.at_s - self._zero_since_s >= self._parameters.grace_s else 1
