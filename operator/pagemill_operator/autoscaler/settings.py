"""`spec.autoscaling` with its defaults filled in, in seconds and milliseconds: what every scaling policy is given."""

from __future__ import annotations

from typing import Literal

import msgspec

from pagemill_crds.quantities import duration_seconds
from pagemill_crds.sections.autoscaling import AutoscalingSection, Behavior, ScalingRules

DEFAULT_POLICY = "Demand"
DEFAULT_KV_CACHE_USAGE = 0.8
DEFAULT_QUEUE_DEPTH = 2
"""What is aimed at where the resource names neither targets nor an SLO."""
DEFAULT_DOWN_WINDOW_S = 300.0
"""As HorizontalPodAutoscaler."""
DEFAULT_IDLE_S = 300.0
"""Without a request, until the last replica goes: the longest that is learned where `scaleToZeroAfter` is not set."""


class Rule(msgspec.Struct, frozen=True):
    type: Literal["Pods", "Percent"]
    value: int
    period_s: float


class Direction(msgspec.Struct, frozen=True):
    window_s: float = 0.0
    """The most cautious demand within it counts."""
    select: Literal["Max", "Min", "Disabled"] = "Max"
    rules: tuple[Rule, ...] = ()
    """Allowed changes; none: any."""
    is_own_window: bool = False
    """The resource sets it: then it is kept as it is."""


class Slo(msgspec.Struct, frozen=True):
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    share: float = 0.95
    """The share of requests that must meet it."""


class ScalingSettings(msgspec.Struct, frozen=True):
    mode: Literal["Active", "Advisory"]
    min_replicas: int
    max_replicas: int
    warm: int = 0
    """Replicas beyond those that are loaded and asleep, as far as `max_replicas` lets them be."""
    kv_cache_usage: float | None = None
    queue_depth: int | None = None
    slo: Slo | None = None
    idle_s: float = DEFAULT_IDLE_S
    """`scaleToZeroAfter`."""
    up: Direction = Direction()
    down: Direction = Direction(DEFAULT_DOWN_WINDOW_S)
    policy: str = DEFAULT_POLICY
    """Name of the algorithm."""
    learns_idle_s: bool = False
    """`scaleToZeroAfter` is not set: the last replica goes sooner than after `idle_s` where starts are learned to be
    short."""

    @property
    def lowest(self) -> int:
        """Fewest replicas, whatever the load."""
        return min(self.max_replicas, self.min_replicas)

    def standby(self, replicas: int) -> int:
        """How many sleep beside so many that are awake. Where the operator only advises, none."""
        if self.mode != "Active":
            return 0
        return max(0, min(self.warm, self.max_replicas - replicas))

    def clamp(self, replicas: int) -> int:
        return max(self.lowest, min(self.max_replicas, replicas))


def settings_of(section: AutoscalingSection | None) -> ScalingSettings | None:
    """None where the operator does not decide: the number is fixed, or another controller writes it."""
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
    )
    return settings if settings.slo is not None else with_default_targets(settings)


def with_default_targets(settings: ScalingSettings) -> ScalingSettings:
    """Where the resource names no targets."""
    if settings.kv_cache_usage is not None or settings.queue_depth is not None:
        return settings
    return msgspec.structs.replace(settings, kv_cache_usage=DEFAULT_KV_CACHE_USAGE, queue_depth=DEFAULT_QUEUE_DEPTH)


def _slo(section: AutoscalingSection) -> Slo | None:
    slo = section.slo
    if slo is None:
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
