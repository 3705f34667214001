"""`spec.autoscaling`: between which bounds and towards which targets the number of replicas moves."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pagemill_crds.base import Rule, Section
from pagemill_crds.fields import Duration, Text

MAX_REPLICAS = 1000


class Targets(Section):
    """Load per replica at which one more is added."""

    kv_cache_usage: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the KV cache that running and waiting requests take, such as 0.8."""
    queue_depth: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Requests waiting per replica, in engines and gateways together."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "kvCacheUsage",
            "targets are empty: set kvCacheUsage or queueDepth, or remove targets",
            "has(self.kvCacheUsage) || has(self.queueDepth)",
            lambda t: t.kv_cache_usage is not None or t.queue_depth is not None,
        ),
    )


class SLO(Section):
    """Latency that requests should meet."""

    ttft: Duration | None = None
    """Time to first token, such as `500ms`."""
    tpot: Duration | None = None
    """Time per output token after the first, such as `50ms`."""
    percentile: Annotated[int, Field(ge=50, le=99)] = 95
    """Percentage of the requests that must meet it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "ttft",
            "the SLO is empty: set ttft or tpot, or remove slo",
            "has(self.ttft) || has(self.tpot)",
            lambda s: s.ttft is not None or s.tpot is not None,
        ),
    )


class ScalingPolicy(Section):
    type: Literal["Pods", "Percent"]
    """Unit of `value`."""
    value: Annotated[int, Field(ge=1, le=1000)]
    """Largest change within the period."""
    period_seconds: Annotated[int, Field(ge=1, le=1800)]
    """Length of the period in seconds."""


class ScalingRules(Section):
    """Limits of one direction; the names and meaning of HorizontalPodAutoscaler."""

    stabilization_window_seconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    """
    Seconds over which the most cautious recommendation wins. Without it 0 upwards; 300 downwards, less where half
    as much load again would leave replicas idle, more where replicas that were removed were soon needed again.
    """
    select_policy: Literal["Max", "Min", "Disabled"] = "Max"
    """Which policy wins; `Disabled` forbids the direction."""
    policies: Annotated[list[ScalingPolicy], Field(max_length=8)] = Field(default_factory=list)
    """Allowed changes; unlimited when empty."""


class Behavior(Section):
    """How fast replicas are added and removed."""

    scale_up: ScalingRules | None = None
    """Limits of adding replicas."""
    scale_down: ScalingRules | None = None
    """Limits of removing replicas."""


class AutoscalingSection(Section):
    """Who decides the number of replicas, and how."""

    mode: Literal["Active", "Advisory", "External"] = "Active"
    """
    `Active`: the operator scales. `Advisory`: it only publishes its decision. `External`: HPA or KEDA writes
    `spec.replicas` through the scale subresource.
    """
    policy: Annotated[str, Text(63, r"^[A-Za-z0-9][A-Za-z0-9._-]*$", "must be a name such as TargetTracking")] = (
        "Demand"
    )
    """
    The algorithm. `Demand`: the replicas that the load needs by `targets`, or by the prediction that `slo` asks for.
    `TargetTracking`: replicas in the ratio of each measured value to its target, as HorizontalPodAutoscaler. Packages
    that are installed with the operator may add others.
    """
    min_replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Fewest replicas that serve; 0 allows scaling to zero."""
    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
    """Most replicas, those of `warm` included."""
    warm: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0
    """
    Standby replicas beyond the demand, as far as `maxReplicas` allows: started, loaded and asleep. They give the memory
    of the KV cache back, take no requests, and are woken before any other replica is started.
    """
    targets: Targets | None = None
    """Load per replica at which one more is added; without targets and slo `kvCacheUsage` 0.8 and `queueDepth` 2."""
    slo: SLO | None = None
    """Latency that requests should meet: the fewest replicas that are predicted to."""
    scale_to_zero_after: Duration | None = None
    """
    Time without any request after which the last replica goes. By default what two starts have taken, one to five
    minutes, and longer where requests came soon after it had gone.
    """
    behavior: Behavior | None = None
    """How fast replicas are added and removed."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "minReplicas",
            "minReplicas must not exceed maxReplicas: lower minReplicas or raise maxReplicas",
            "self.minReplicas <= self.maxReplicas",
            lambda a: a.min_replicas <= a.max_replicas,
        ),
        Rule(
            "warm",
            "warm must not exceed maxReplicas: lower warm or raise maxReplicas",
            "self.warm <= self.maxReplicas",
            lambda a: a.warm <= a.max_replicas,
        ),
        Rule(
            "scaleToZeroAfter",
            "scaleToZeroAfter needs minReplicas 0: set minReplicas to 0 or remove scaleToZeroAfter",
            "!has(self.scaleToZeroAfter) || self.minReplicas == 0",
            lambda a: a.scale_to_zero_after is None or a.min_replicas == 0,
        ),
        Rule(
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
