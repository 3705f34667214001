"""llm-d's workload variant autoscaler, version 1 (saturation): one replica more when the engines' spare capacity is
low.

Source: llm-d workload-variant-autoscaler 0.5.1, https://github.com/llm-d/llm-d-workload-variant-autoscaler, documents
docs/saturation-analyzer.md (14bed5d) and docs/saturation-scaling-config.md (2ca0f70): an engine is saturated at 80 % of
its cache or 5 waiting requests; a replica is added if the others have on average less than 10 % or 3 to spare; one is
removed if the load of N on N - 1 still leaves that much. Peaks of the last minute count. Nothing is decided while a pod
starts or a decision is not applied yet (pull request 569). One variant, and at least one replica.

Its decision is a metric that a HorizontalPodAutoscaler follows. `wva` applies it at once, which is better than any such
setup; `wva-hpa` has the autoscaler of its chart (docs/integrations/hpa-integration.md, d44975b, production
configuration), which waits four minutes in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from pagemill_operator.autoscaler.decision import Decision, decided
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Signals
from pagemill_simulator.parameters import NotNegative, Parameters, Positive, Share
from pagemill_simulator.scaling.hpa_behavior import BehaviorMemory, HpaBehavior, HpaDirection, HpaRule
from pagemill_simulator.scaling.policy import ReplicaBounds
from pagemill_simulator.scaling.rival import LoadWindow, Rival, engines, is_due, num_waiting, within

SCRAPE_S = 15.0
"""Seconds between scrapes, and between runs of the autoscaler."""
CHART_RULES = (HpaRule("pods", 10.0, 150.0),)
"""Rules of the chart's autoscaler, for both directions."""


class Wva(Parameters, frozen=True, kw_only=True):
    """Scales by saturation thresholds of cache and queue, one replica at a time."""

    name: ClassVar[str] = "wva"
    kv_threshold: Share = 0.8
    """`kvCacheThreshold`: the use at which an engine is saturated."""
    queue_threshold: Positive = 5.0
    """`queueLengthThreshold`: the queue at which an engine is saturated."""
    kv_spare: NotNegative = 0.1
    """`kvSpareTrigger`: the least mean spare share of the cache."""
    queue_spare: NotNegative = 3.0
    """`queueSpareTrigger`: the least mean spare of the queue."""
    interval_s: Positive = 30.0
    """Seconds between decisions."""
    peak_s: Positive = 60.0
    """Seconds within which the highest value counts."""

    def policy(self) -> Rival[Any]:
        return WvaSaturation(self)


class WvaHpa(Wva, frozen=True, kw_only=True):
    """`wva` with the autoscaler that follows it."""

    name: ClassVar[str] = "wva-hpa"
    up_window_s: NotNegative = 240.0
    """`hpa.behavior.scaleUp.stabilizationWindowSeconds`."""
    down_window_s: NotNegative = 240.0
    """`hpa.behavior.scaleDown.stabilizationWindowSeconds`."""

    def policy(self) -> Rival[Any]:
        return WvaThroughHpa(self)


class WvaLoad(NamedTuple):
    """The load of one engine."""

    kv_usage: float
    num_waiting: float


class Peaks(msgspec.Struct, frozen=True):
    kv_usage: LoadWindow = LoadWindow()
    num_waiting: LoadWindow = LoadWindow()

    def add(self, at_s: float, load: WvaLoad, length_s: float) -> Peaks:
        return Peaks(
            self.kv_usage.add(at_s, load.kv_usage, length_s), self.num_waiting.add(at_s, load.num_waiting, length_s)
        )


class WvaMemory(msgspec.Struct, frozen=True):
    scraped_at_s: float | None = None
    decided_at_s: float | None = None
    peaks: dict[str, Peaks] = {}
    """Peaks by id of the reporting engine."""


class WvaSaturation:
    name: ClassVar[str] = Wva.name
    memory_type: ClassVar[type[WvaMemory]] = WvaMemory
    sees_replicas: ClassVar[bool] = True
    reads_slo: ClassVar[bool] = False
    wakes_at_once: ClassVar[bool] = False

    def __init__(self, parameters: Wva | None = None) -> None:
        self._parameters = parameters or Wva()
        self.interval_s = min(SCRAPE_S, self._parameters.interval_s)

    def decide(self, settings: ScalingSettings, signals: Signals, memory: WvaMemory) -> tuple[Decision, WvaMemory]:
        before, at_s = signals.fleet.wanted, signals.at_s
        wanted = within(settings, before, least=1)
        if not is_due(at_s, memory.scraped_at_s, self.interval_s):
            return decided(before, wanted, "between two scrapes"), memory
        peaks = self._peaks(signals, memory)
        if not is_due(at_s, memory.decided_at_s, self._parameters.interval_s):
            return decided(before, wanted, "between two decisions"), WvaMemory(at_s, memory.decided_at_s, peaks)
        memory = WvaMemory(at_s, at_s, peaks)
        if not peaks or len(peaks) != before:
            return decided(before, wanted, "a replica starts, or no engine has metrics"), memory
        loads = [WvaLoad(peak.kv_usage.max, peak.num_waiting.max) for peak in peaks.values()]
        replicas = within(settings, len(loads) + step(loads, self._parameters), least=1)
        return decided(before, replicas, f"what {len(loads)} engines can spare"), memory

    def _peaks(self, signals: Signals, memory: WvaMemory) -> dict[str, Peaks]:
        length_s = self._parameters.peak_s
        return {
            engine.id: memory.peaks.get(engine.id, Peaks()).add(
                signals.at_s, WvaLoad(engine.load.kv_cache_usage, num_waiting(engine, signals)), length_s
            )
            for engine in engines(signals)
        }


class WvaHpaMemory(msgspec.Struct, frozen=True):
    decided_at_s: float | None = None
    decider: WvaMemory = WvaMemory()
    behavior: BehaviorMemory = BehaviorMemory()
    published: int | None = None
    """The metric that the autoscaler follows."""


class WvaThroughHpa:
    name: ClassVar[str] = WvaHpa.name
    memory_type: ClassVar[type[WvaHpaMemory]] = WvaHpaMemory
    sees_replicas: ClassVar[bool] = True
    reads_slo: ClassVar[bool] = False
    wakes_at_once: ClassVar[bool] = False
    interval_s: ClassVar[float] = SCRAPE_S

    def __init__(self, parameters: WvaHpa | None = None) -> None:
        self._parameters = parameters or WvaHpa()
        self._decider = WvaSaturation(self._parameters)
        self._behavior = HpaBehavior(
            HpaDirection(self._parameters.up_window_s, CHART_RULES),
            HpaDirection(self._parameters.down_window_s, CHART_RULES),
        )

    def decide(
        self, settings: ScalingSettings, signals: Signals, memory: WvaHpaMemory
    ) -> tuple[Decision, WvaHpaMemory]:
        before, at_s = signals.fleet.wanted, signals.at_s
        wanted = within(settings, before, least=1)
        if not is_due(at_s, memory.decided_at_s, SCRAPE_S):
            return decided(before, wanted, "between two decisions"), memory
        decision, decider = self._decider.decide(settings, signals, memory.decider)
        published = decision.replicas if memory.published in (None, wanted) else memory.published
        low, high = settings.min_replicas, settings.max_replicas
        least_one = ReplicaBounds(min(high, max(1, low)), high)
        replicas, behavior = self._behavior.limit(memory.behavior, at_s, wanted, published or wanted, least_one)
        message = f"the metric asks for {published}"
        return decided(before, replicas, message), WvaHpaMemory(at_s, decider, behavior, published)


def step(loads: Sequence[WvaLoad], parameters: Wva) -> int:
    """Return 1 for one replica more, -1 for one fewer, else 0."""
    free = [
        load
        for load in loads
        if load.kv_usage < parameters.kv_threshold and load.num_waiting < parameters.queue_threshold
    ]
    if not free or not _spares(free, len(free), parameters):
        return 1
    # The load of all unsaturated engines, on one fewer.
    return -1 if len(free) > 1 and _spares(free, len(free) - 1, parameters) else 0


def _spares(loads: Sequence[WvaLoad], replicas: int, parameters: Wva) -> bool:
    """Whether so many replicas under these loads have enough to spare on average."""
    kv_usage = math.fsum(load.kv_usage for load in loads) / replicas
    mean_waiting = math.fsum(load.num_waiting for load in loads) / replicas
    return (
        parameters.kv_threshold - kv_usage >= parameters.kv_spare
        and parameters.queue_threshold - mean_waiting >= parameters.queue_spare
    )
