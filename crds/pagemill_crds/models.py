"""The resource `LLMDeployment`: metadata, spec and status.

The only source of the API: the CRD's YAML, the reference page and `pagemill explain` are generated from these models.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from pagemill_crds.base import Section, SectionRule
from pagemill_crds.fields import Cpu, Memory, ObjectName, Text
from pagemill_crds.sections.autoscaling import MAX_REPLICAS, AutoscalingSection
from pagemill_crds.sections.engine import EngineSection
from pagemill_crds.sections.model import ModelSection
from pagemill_crds.sections.rollout import CostSection, RolloutSection, TemplateSection
from pagemill_crds.sections.routing import RoutingSection
from pagemill_crds.status import LLMDeploymentStatus

MAX_NAME_LENGTH = 48
"""Pods, Services and their hashes are named after the deployment, and their names are limited to 63 characters."""


class ObjectMeta(BaseModel):
    """The part of Kubernetes' ObjectMeta that Pagemill reads; the API server validates the rest."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    name: ObjectName
    namespace: ObjectName = "default"
    uid: str = ""
    generation: int = 0
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class ResourcesSection(Section):
    """Resources of each pod of a replica."""

    gpus: Annotated[int, Field(ge=0, le=16)] = 0
    """Number of GPUs per pod; 0 selects the CPU engine."""
    gpu_product: (
        Annotated[str, Text(63, r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", "must be a label value")] | None
    ) = None
    """GPU model to schedule on, as in the node label `nvidia.com/gpu.product`, such as `NVIDIA-H100-80GB-HBM3`."""
    cpu: Cpu | None = None
    """CPU cores, such as `2`, `"1.5"` or `500m`. A CPU engine computes with as many threads."""
    memory: Memory | None = None
    """Memory, such as `8Gi`."""

    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "gpuProduct",
            "gpuProduct needs GPUs: set gpus to 1 or more, or remove gpuProduct",
            "!has(self.gpuProduct) || self.gpus > 0",
            lambda r: r.gpu_product is None or r.gpus > 0,
        ),
    )


class LLMDeploymentSpec(Section):
    """Desired state of a served model: the model, the engine that runs it, and how it is scaled, routed and updated."""

    model: ModelSection
    """The model to serve and the names under which clients request it."""
    engine: EngineSection = EngineSection()
    """Settings of the inference engine: precision, context length, batch size and KV cache."""
    resources: ResourcesSection = ResourcesSection()
    """Resources of each pod of a replica."""
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Desired number of replicas. Used where `autoscaling` is absent or its mode is Advisory or External."""
    autoscaling: AutoscalingSection | None = None
    """How the number of replicas is decided. When absent, the number is fixed at `replicas`."""
    routing: RoutingSection = RoutingSection()
    """How the gateway distributes requests over replicas, and how many requests may wait."""
    rollout: RolloutSection = RolloutSection()
    """How replicas are replaced when the spec changes."""
    template: TemplateSection | None = None
    """Overrides of the pod template."""
    cost: CostSection | None = None
    """Prices from which cost figures are computed."""

    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "engine.tensorParallel",
            "tensorParallel x pipelineParallel must be a multiple of resources.gpus, so that every GPU has work: "
            "raise tensorParallel or lower gpus",
            "self.resources.gpus == 0 || "
            "self.engine.tensorParallel * self.engine.pipelineParallel % self.resources.gpus == 0",
            lambda s: (
                s.resources.gpus == 0 or s.engine.tensor_parallel * s.engine.pipeline_parallel % s.resources.gpus == 0
            ),
        ),
    )


class LLMDeployment(Section):
    """A language model served by dedicated engines behind the gateway."""

    api_version: Literal["pagemill.dev/v1beta1"]
    kind: Literal["LLMDeployment"]
    metadata: ObjectMeta
    spec: LLMDeploymentSpec
    """Desired state."""
    status: LLMDeploymentStatus | None = None
    """Observed state, written by the operator."""

    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "metadata.name",
            f"the name is too long or contains a dot: use at most {MAX_NAME_LENGTH} letters, digits and '-'",
            f"size(self.metadata.name) <= {MAX_NAME_LENGTH} && !self.metadata.name.contains('.')",
            lambda d: len(d.metadata.name) <= MAX_NAME_LENGTH and "." not in d.metadata.name,
        ),
        SectionRule(
            "metadata.name",
            "the name starts with a digit, which the name of a Service must not: put a letter first; clients use "
            "spec.model.name, which may start with one",
            "self.metadata.name.matches('^[^0-9]')",
            lambda d: not d.metadata.name[:1].isdigit(),
        ),
    )

    @property
    def key(self) -> str:
        """Namespace and name, as `namespace/name`."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def model_name(self) -> str:
        """The model name that clients send."""
        return self.spec.model.name or self.metadata.name

    @property
    def names(self) -> list[str]:
        """The model's name and its aliases."""
        return [self.model_name, *self.spec.model.aliases]
