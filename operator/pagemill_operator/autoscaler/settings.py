"""The settings of a scaling policy: `spec.autoscaling` with defaults filled in, in seconds and milliseconds."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from pagemill_crds.sections.autoscaling import AutoscalingSection, Behavior, ScalingRules
from pagemill_protocol.resource.quantities import duration_seconds

DEFAULT_POLICY = "Demand"
DEFAULT_KV_CACHE_USAGE = 0.8
DEFAULT_QUEUE_DEPTH = 2
"""The targets where the resource names neither targets nor an SLO."""
DEFAULT_DOWN_WINDOW_S = 300.0
"""The default of HorizontalPodAutoscaler."""
DEFAULT_IDLE_S = 300.0
"""The longest time without a request until the last replica is removed, where `scaleToZeroAfter` is not set."""


class Rule(msgspec.Struct, frozen=True):
    """A limit on the changes within a period."""

    type: Literal["Pods", "Percent"]
    value: int
    period_s: float


class Direction(msgspec.Struct, frozen=True):
    """The behavior in one direction, up or down."""

    window_s: float = 0.0
    """The stabilization window: the most cautious demand within it is followed."""
    select: Literal["Max", "Min", "Disabled"] = "Max"
    """Which rule decides where there are several."""
    rules: tuple[Rule, ...] = ()
    """Limits on changes; empty: any change is allowed."""
    is_own_window: bool = False
    """Whether the resource sets the window, which is then never changed by what is learned."""


class Slo(msgspec.Struct, frozen=True):
    """Latencies that a share of the requests must meet; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    share: float = 0.95
    """The share of requests that must meet it."""


class HourlyCost(NamedTuple):
    """The cost of running a number of replicas for an hour."""

    pod_seconds: int
    money: float | None
    """In the currency of `spec.cost`; None: no price is set."""

    def __str__(self) -> str:
        price = "" if self.money is None else f" at {self.money:.2f}"
        return f"{self.pod_seconds:,} pod-seconds/h{price}"


class ScalingSettings(msgspec.Struct, frozen=True):
    """The settings of one deployment."""

    mode: Literal["Active", "Advisory"]
    min_replicas: int
    max_replicas: int
    warm: int = 0
    """Replicas beyond the demand that are kept loaded and asleep, as far as `max_replicas` allows."""
    kv_cache_usage: float | None = None
    queue_depth: int | None = None
    slo: Slo | None = None
    idle_s: float = DEFAULT_IDLE_S
    """The time without a request after which the last replica is removed (`scaleToZeroAfter`)."""
    up: Direction = Direction()
    down: Direction = Direction(DEFAULT_DOWN_WINDOW_S)
    policy: str = DEFAULT_POLICY
    """The name of the policy."""
    learns_idle_s: bool = False
    """Whether `scaleToZeroAfter` is not set: the last replica is then removed sooner than after `idle_s` where starts
    are short."""
    replica_price: float | None = None
    """The price of one replica for an hour, by `spec.cost`. None: unknown."""

    @property
    def lowest(self) -> int:
        """The fewest replicas at any load."""
        return min(self.max_replicas, self.min_replicas)

    def standby(self, replicas: int) -> int:
        """Return how many replicas sleep beside `replicas` that are awake; 0 where the operator only advises."""
        if self.mode != "Active":
            return 0
        return max(0, min(self.warm, self.max_replicas - replicas))

    def clamp(self, replicas: int) -> int:
        """Return the nearest number within the bounds."""
        return max(self.lowest, min(self.max_replicas, replicas))

    def cost_of(self, replicas: int) -> HourlyCost:
        """Return the cost of so many replicas."""
        return HourlyCost(3600 * replicas, None if self.replica_price is None else replicas * self.replica_price)


def settings_of(section: AutoscalingSection | None, replica_price: float | None = None) -> ScalingSettings | None:
    """Return the settings, or None where the operator does not decide the number of replicas.

    That is where the number is fixed, or where another controller writes it. `replica_price`: of one replica for an
    hour.
    """
    if section is None or section.mode == "External":
        return None
    targets, behavior = section.targets, section.behavior or Behavior()
    settings = ScalingSettings(
        mode=section.mode,
        min_replicas=section.min_replicas,
        max_replicas=section.max_replicas,
        warm=section.warm,
        kv_cache_usage=targets.kv_cache_usage if targets else None,
        queue_depth=targets.queue_depth if targets else None,
        slo=_slo(section),
        idle_s=duration_seconds(section.scale_to_zero_after) if section.scale_to_zero_after else DEFAULT_IDLE_S,
        up=_direction(behavior.scale_up, 0.0),
        down=_direction(behavior.scale_down, DEFAULT_DOWN_WINDOW_S),
        policy=section.policy,
        learns_idle_s=not section.scale_to_zero_after,
        replica_price=replica_price,
    )
    return settings if settings.slo is not None else with_default_targets(settings)


def with_default_targets(settings: ScalingSettings) -> ScalingSettings:
    """Return the settings with the default targets where the resource names none."""
    if settings.kv_cache_usage is not None or settings.queue_depth is not None:
        return settings
    return msgspec.structs.replace(settings, kv_cache_usage=DEFAULT_KV_CACHE_USAGE, queue_depth=DEFAULT_QUEUE_DEPTH)


def _slo(section: AutoscalingSection) -> Slo | None:
    slo = section.slo
    if slo is None or (slo.ttft is None and slo.tpot is None):
        return None
    return Slo(
        ttft_ms=duration_seconds(slo.ttft) * 1000 if slo.ttft else None,
        tpot_ms=duration_seconds(slo.tpot) * 1000 if slo.tpot else None,
        share=slo.percentile / 100,
    )


def _direction(rules: ScalingRules | None, default_window_s: float) -> Direction:
    if rules is None:
        return Direction(default_window_s)
    window_s = rules.stabilization_window_seconds
    return Direction(
        window_s=default_window_s if window_s is None else float(window_s),
        select=rules.select_policy,
        rules=tuple(Rule(rule.type, rule.value, float(rule.period_seconds)) for rule in rules.policies),
        is_own_window=window_s is not None,
    )
