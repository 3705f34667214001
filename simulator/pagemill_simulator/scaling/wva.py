"""llm-d's workload variant autoscaler, version 1 (saturation): one replica more when what engines can spare gets low.

Source: llm-d workload-variant-autoscaler 0.5.1, https://github.com/llm-d/llm-d-workload-variant-autoscaler, documents
docs/saturation-analyzer.md (14bed5d) and docs/saturation-scaling-config.md (2ca0f70): an engine is saturated at 80 % of
its cache or 5 waiting requests; one replica comes when the others spare on average less than 10 % or 3; one goes when
the load of N on N - 1 still leaves that much. Peaks of the last minute count. Nothing is decided while a pod starts
or a decision is not applied yet (pull request 569). One variant, and no lower than one replica.

What it decides is a metric that a HorizontalPodAutoscaler follows. `wva` is applied at once, which is better than any
such setup; `wva-hpa` has the autoscaler of its chart (docs/integrations/hpa-integration.md, d44975b, production
configuration): both ways it waits four minutes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from pagemill_simulator.parameters import NotNegative, Parameters, Positive, Share
from pagemill_simulator.scaling.hpa_behavior import Behavior, Direction, Rule
from pagemill_simulator.scaling.measured import Timer, Window, engines, within
from pagemill_simulator.scaling.policy import Bounds, ScalingPolicy, Seen

SCRAPE_S = 15.0
"""Of metrics, and the autoscaler's own interval."""
CHART_RULES = (Rule("pods", 10.0, 150.0),)
"""Of the chart's autoscaler, both ways."""


class Wva(Parameters, frozen=True, kw_only=True):
    """Saturation thresholds of cache and queue, one replica at a time."""

    name: ClassVar[str] = "wva"
    kv_threshold: Share = 0.8
    """`kvCacheThreshold`: at it an engine is saturated."""
    queue_threshold: Positive = 5.0
    """`queueLengthThreshold`: at it an engine is saturated."""
    kv_spare: NotNegative = 0.1
    """`kvSpareTrigger`: less is too little."""
    queue_spare: NotNegative = 3.0
    """`queueSpareTrigger`: less is too little."""
    interval_s: Positive = 30.0
    """Between decisions."""
    peak_s: Positive = 60.0
    """Of which the highest value counts."""

    def policy(self, bounds: Bounds) -> ScalingPolicy:
        return WvaSaturation(bounds, self)


class WvaHpa(Wva, frozen=True, kw_only=True):
    """As `wva`, and the autoscaler that follows it."""

    name: ClassVar[str] = "wva-hpa"
    up_window_s: NotNegative = 240.0
    """`hpa.behavior.scaleUp.stabilizationWindowSeconds`."""
    down_window_s: NotNegative = 240.0
    """`hpa.behavior.scaleDown.stabilizationWindowSeconds`."""

    def policy(self, bounds: Bounds) -> ScalingPolicy:
        return WvaThroughHpa(bounds, self)


class Load(NamedTuple):
    """Of one engine."""

    kv_usage: float
    num_waiting: float


class _Peaks:
    def __init__(self, length_s: float) -> None:
        self.kv_usage, self.num_waiting = Window(length_s), Window(length_s)


class WvaSaturation:
    name = Wva.name
    wakes_at_once = False

    def __init__(self, bounds: Bounds, parameters: Wva | None = None) -> None:
        self._bounds = bounds
        self._parameters = parameters or Wva()
        self.interval_s = min(SCRAPE_S, self._parameters.interval_s)
        self._timer = Timer(self._parameters.interval_s)
        self._peaks: dict[str, _Peaks] = {}

    def decide(self, seen: Seen) -> int:
        loads = self._observe(seen)
        wanted = within(self._bounds, seen.wanted, least=1)
        is_changing = len(loads) != seen.wanted
        if not self._timer.is_due(seen.at_s) or is_changing or not loads:
            return wanted
        return within(self._bounds, len(loads) + step(loads, self._parameters), least=1)

    def _observe(self, seen: Seen) -> list[Load]:
        """The peaks of those that tell."""
        peaks: dict[str, _Peaks] = {}
        for engine in engines(seen):
            peaks[engine.name] = peak = self._peaks.get(engine.name) or _Peaks(self._parameters.peak_s)
            peak.kv_usage.add(seen.at_s, engine.kv_usage)
            peak.num_waiting.add(seen.at_s, engine.num_waiting)
        self._peaks = peaks
        return [Load(peak.kv_usage.max, peak.num_waiting.max) for peak in peaks.values()]


class WvaThroughHpa:
    name = WvaHpa.name
    wakes_at_once = False
    interval_s = SCRAPE_S

    def __init__(self, bounds: Bounds, parameters: WvaHpa | None = None) -> None:
        self._bounds = bounds
        self._parameters = parameters or WvaHpa()
        self._decider = WvaSaturation(bounds, self._parameters)
        self._behavior = Behavior(
            Direction(self._parameters.up_window_s, CHART_RULES), Direction(self._parameters.down_window_s, CHART_RULES)
        )
        self._timer = Timer(self.interval_s)
        self._published: int | None = None

    def decide(self, seen: Seen) -> int:
        wanted = within(self._bounds, seen.wanted, least=1)
        if not self._timer.is_due(seen.at_s):
            return wanted
        decided = self._decider.decide(seen)
        if self._published in (None, wanted):
            self._published = decided
        least_one = Bounds(min(self._bounds.max_replicas, max(1, self._bounds.min_replicas)), self._bounds.max_replicas)
        return self._behavior.limit(seen.at_s, wanted, self._published or wanted, least_one)


def step(loads: Sequence[Load], parameters: Wva) -> int:
    """One replica more, one fewer, or none."""
    free = [
        load
        for load in loads
        if load.kv_usage < parameters.kv_threshold and load.num_waiting < parameters.queue_threshold
    ]
    if not free or not _spares(free, len(free), parameters):
        return 1
    # The load of all that are free, on one fewer.
    return -1 if len(free) > 1 and _spares(free, len(free) - 1, parameters) else 0


def _spares(loads: Sequence[Load], replicas: int, parameters: Wva) -> bool:
    """Whether so many replicas under these loads have enough left, on average."""
    kv_usage = math.fsum(load.kv_usage for load in loads) / replicas
    num_waiting = math.fsum(load.num_waiting for load in loads) / replicas
    return (
        parameters.kv_threshold - kv_usage >= parameters.kv_spare
        and parameters.queue_threshold - num_waiting >= parameters.queue_spare
    )
