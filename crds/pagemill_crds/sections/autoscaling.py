"""`spec.autoscaling`: the bounds and targets of the number of replicas."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pagemill_crds.base import Section, SectionRule
from pagemill_crds.fields import Duration, Text

MAX_REPLICAS = 1000


class Targets(Section):
    """Load per replica above which replicas are added."""

    kv_cache_usage: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a replica's KV cache that running and waiting requests may fill, such as 0.8."""
    queue_depth: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Requests per replica that may wait, counted over engines and gateways together."""

    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "kvCacheUsage",
            "targets are empty: set kvCacheUsage or queueDepth, or remove targets",
            "has(self.kvCacheUsage) || has(self.queueDepth)",
            lambda t: t.kv_cache_usage is not None or t.queue_depth is not None,
        ),
    )


DEFAULT_OBJECTIVE = 99.5
"""Percentage of requests that must be answered where a deployment declares none."""


class SLO(Section):
    """Objectives of requests: their latency, and that they are answered."""

    ttft: Duration | None = None
    """Longest time to first token, such as `500ms`."""
    tpot: Duration | None = None
    """Longest time per output token after the first, such as `50ms`."""
    percentile: Annotated[int, Field(ge=50, le=99)] = 95
    """Percentage of requests that must meet `ttft` and `tpot`."""
    objective: Annotated[float, Field(ge=50, le=99.999)] | None = None
    """Percentage of requests that must be answered, such as 99.9; the error budget of alerts is what is left. Default:
    99.5."""

    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "ttft",
            "the SLO is empty: set ttft, tpot or objective, or remove slo",
            "has(self.ttft) || has(self.tpot) || has(self.objective)",
            lambda s: (s.ttft, s.tpot, s.objective) != (None, None, None),
        ),
    )


class HPAScalingPolicy(Section):
    type: Literal["Pods", "Percent"]
    """Unit of `value`: `Pods` is a number of replicas, `Percent` a percentage of the current number."""
    value: Annotated[int, Field(ge=1, le=1000)]
    """Largest change within `periodSeconds`."""
    period_seconds: Annotated[int, Field(ge=1, le=1800)]
    """Length of the period in seconds."""


class ScalingRules(Section):
    """Limits on changes in one direction. Names and meaning are those of HorizontalPodAutoscaler."""

    stabilization_window_seconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    """Seconds of past recommendations of which the most cautious one is applied. Default when scaling up: 0. Default
    when scaling down: three times the usual start of a replica, from 30 to 300; shorter for replicas that would stay
    idle even at one and a half times the load, and longer after removed replicas were soon needed again."""
    select_policy: Literal["Max", "Min", "Disabled"] = "Max"
    """Which of several policies applies; `Disabled` forbids scaling in this direction."""
    policies: Annotated[list[HPAScalingPolicy], Field(max_length=8)] = Field(default_factory=list)
    """Limits on the rate of change; no limit when empty."""


class Behavior(Section):
    """How fast replicas may be added and removed."""

    scale_up: ScalingRules | None = None
    """Limits on adding replicas."""
    scale_down: ScalingRules | None = None
    """Limits on removing replicas."""


class AutoscalingSection(Section):
    """How the number of replicas is decided."""

    mode: Literal["Active", "Advisory", "External"] = "Active"
    """`Active`: the operator scales. `Advisory`: the operator only publishes its decision. `External`: HPA or KEDA
    writes `spec.replicas` through the scale subresource."""
    policy: Annotated[str, Text(63, r"^[A-Za-z0-9][A-Za-z0-9._-]*$", "must be a name such as TargetTracking")] = (
        "Demand"
    )
    """Scaling algorithm. `Demand` computes the replicas that the load needs to meet `targets` and, where `slo` is set,
    the replicas that are predicted to meet it. `TargetTracking` scales in the ratio of each measured value to its
    target, as HorizontalPodAutoscaler does. Packages that are installed with the operator may add others."""
    min_replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Minimum number of replicas that serve; 0 allows scaling to zero."""
    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
    """Maximum number of replicas, including those of `warm`. In mode `External` the other controller's own bounds apply
    in place of these."""
    warm: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0
    """Number of standby replicas kept in addition to the demand, up to `maxReplicas`. A standby replica has loaded the
    weights and sleeps: it releases the memory of its KV cache, receives no requests, and is woken before any new
    replica is started."""
    targets: Targets | None = None
    """Load per replica above which replicas are added. Default without `targets` and `slo`: `kvCacheUsage` 0.8 and
    `queueDepth` 2."""
    slo: SLO | None = None
    """Objectives. The condition `SLOMet` compares those of latency with what clients observe. Policy `Demand` runs the
    fewest replicas that are predicted to meet it; `TargetTracking` does not scale by it."""
    scale_to_zero_after: Duration | None = None
    """Time without requests, and since it became ready, after which the last replica is removed. Default: the duration
    of a start, at least 20 seconds and at most five minutes, and longer after requests came soon after a removal."""
    behavior: Behavior | None = None
    """How fast replicas may be added and removed."""

    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "minReplicas",
            "minReplicas must not exceed maxReplicas: lower minReplicas or raise maxReplicas",
            "self.minReplicas <= self.maxReplicas",
            lambda a: a.min_replicas <= a.max_replicas,
        ),
        SectionRule(
            "warm",
            "warm must not exceed maxReplicas: lower warm or raise maxReplicas",
            "self.warm <= self.maxReplicas",
            lambda a: a.warm <= a.max_replicas,
        ),
        SectionRule(
            "scaleToZeroAfter",
            "scaleToZeroAfter needs minReplicas 0: set minReplicas to 0 or remove scaleToZeroAfter",
            "!has(self.scaleToZeroAfter) || self.minReplicas == 0",
            lambda a: a.scale_to_zero_after is None or a.min_replicas == 0,
        ),
        SectionRule(
            "mode",
            "in mode External another controller decides: remove policy, targets, slo, warm, behavior and "
            "scaleToZeroAfter, or choose Active or Advisory",
            "self.mode != 'External' || (self.policy == 'Demand' && !has(self.targets) && !has(self.slo) "
            "&& self.warm == 0 && !has(self.behavior) && !has(self.scaleToZeroAfter))",
            lambda a: (
                a.mode != "External"
                or (a.policy, a.targets, a.slo, a.warm, a.behavior, a.scale_to_zero_after)
                == ("Demand", None, None, 0, None, None)
            ),
        ),
    )
