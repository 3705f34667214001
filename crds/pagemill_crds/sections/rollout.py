"""`spec.rollout`, `spec.template` and `spec.cost`: rolling updates, pod template and prices."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pagemill_crds.base import Section, SectionRule
from pagemill_crds.fields import CountOrPercent, Duration, Text

Label = Annotated[str, Text(63, min_length=0)]
Annotation = Annotated[str, Text(4096, min_length=0)]
ZERO = (0, "0%", "00%")


class RolloutSection(Section):
    """How replicas are replaced when the spec changes."""

    strategy: Literal["Auto", "Surge", "Replace"] = "Auto"
    """`Surge` adds replicas before it removes others; `Replace` removes first, for nodes without room for more. `Auto`
    adds first, and replaces in place where an added replica finds no node for 60 seconds and no request fails by it:
    another replica is ready, or the measured start is shorter than `routing.queue.timeout`."""
    max_surge: CountOrPercent = 1
    """Number of replicas, as a count or a percentage, that may be started in addition to the desired number."""
    max_unavailable: CountOrPercent = 0
    """Number of replicas, as a count or a percentage, that may be unavailable during a rollout."""
    drain_timeout: Duration = "60s"
    """Time that a replica's running requests get to finish before it terminates."""

    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "maxSurge",
            "maxSurge and maxUnavailable are both 0, so nothing could be replaced: set one of them to 1",
            # Guarded, because the API server also evaluates rules on the definition's own default `{}`.
            "!has(self.maxSurge) || !has(self.maxUnavailable) || "
            "!((self.maxSurge == 0 || self.maxSurge == '0%' || self.maxSurge == '00%') && (self.maxUnavailable == 0 "
            "|| self.maxUnavailable == '0%' || self.maxUnavailable == '00%'))",
            lambda r: r.max_surge not in ZERO or r.max_unavailable not in ZERO,
        ),
    )


class TemplateMetadata(Section):
    """Labels and annotations of the pods."""

    labels: Annotated[dict[str, Label], Field(max_length=64)] = Field(default_factory=dict)
    """Labels added to the pods."""
    annotations: Annotated[dict[str, Annotation], Field(max_length=64)] = Field(default_factory=dict)
    """Annotations added to the pods."""


class TemplateSection(Section):
    """Overrides of the pod template, merged over the operator's pod template."""

    metadata: TemplateMetadata | None = None
    """Labels and annotations of the pods."""
    spec: Annotated[dict[str, Any] | None, Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})] = (
        None
    )
    """Any part of a PodSpec, such as nodeSelector, tolerations, affinity and priorityClassName."""


class CostSection(Section):
    """Prices from which metrics and plans compute costs."""

    gpu_hour: Annotated[float, Field(ge=0, le=10_000)] | None = None
    """Price of one GPU for one hour, in any currency; used for costs in metrics and in `pagemill plan`."""
    hour: Annotated[float, Field(ge=0, le=10_000)] | None = None
    """Price of one replica for one hour beside its GPUs, such as that of its CPUs and memory."""

    def of_replica(self, gpus: int | None) -> float | None:
        """Return the price of one replica with so many GPUs for an hour, or None if it is unknown."""
        of_gpus = None if self.gpu_hour is None or not gpus else self.gpu_hour * gpus
        return self.hour if of_gpus is None else of_gpus + (self.hour or 0.0)
