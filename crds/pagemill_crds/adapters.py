"""The resource `LoRAAdapter`: one adapter for the engines of an LLMDeployment, which do not restart for it.

Neighbours: `sections.model` has the adapters that an LLMDeployment lists itself; `status` the parts that both share.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pagemill_crds.base import Section
from pagemill_crds.fields import ModelName, ObjectName, merged_by
from pagemill_crds.models import ObjectMeta
from pagemill_crds.sections.model import Source
from pagemill_crds.status import AdapterReplicas, Condition, Count


class LoRAAdapterSpec(Section):
    """Desired state of a served LoRA adapter."""

    deployment: ObjectName
    """Name of the LLMDeployment whose engines serve the adapter, in the namespace of this resource."""
    source: Source
    """Location of the LoRA weights: a folder as PEFT writes it, with the schemes of an LLMDeployment's
    `spec.model.source`."""
    name: ModelName | None = None
    """Name that clients send in `model`; when absent, the name of this resource."""
    pinned: bool = False
    """Whether replicas load the adapter before they are ready, and keep it in memory."""


class LoRAAdapterStatus(AdapterReplicas):
    """Observed state of the LoRAAdapter."""

    observed_generation: Count = 0
    """Generation of the spec that the status describes."""
    name: str = ""
    """Name that clients put into `model`: `spec.name`, or the name of the resource."""
    conditions: Annotated[list[Condition], merged_by("type", 8)] = Field(default_factory=list)
    """Conditions: Accepted (whether the engines are asked to serve it) and Ready (whether all replicas do)."""


class LoRAAdapter(Section):
    """A LoRA adapter that the engines of an LLMDeployment serve beside its model."""

    api_version: Literal["pagemill.dev/v1beta1"]
    kind: Literal["LoRAAdapter"]
    metadata: ObjectMeta
    spec: LoRAAdapterSpec
    """Desired state."""
    status: LoRAAdapterStatus | None = None
    """Observed state, written by the operator."""

    @property
    def name(self) -> str:
        """The name that clients send."""
        return self.spec.name or self.metadata.name
