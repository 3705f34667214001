"""`status`: the observed state, as conditions without phases and without values that change every second.

Sources: the Kubernetes API conventions on conditions (a list-map keyed by type, absent means Unknown).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pagemill_crds.base import Section
from pagemill_crds.fields import Text, merged_by

REASON_PATTERN = r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
TYPE_PATTERN = r"^[A-Za-z]([A-Za-z0-9]*)$"

Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Count = Annotated[int, Field(ge=0)]


class Condition(Section):
    """One observation of the resource."""

    # No enumeration: an older schema must keep the conditions of a newer operator.
    type: Annotated[str, Text(316, TYPE_PATTERN)]
    """Type of the condition: of an LLMDeployment Planned, Scheduled, ModelLoaded, Serving, ScalingActive, SLOMet,
    FieldsSupported or Ready, of a LoRAAdapter Accepted or Ready."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds: True, False or Unknown."""
    observed_generation: Count = 0
    """Generation of the spec that the condition was observed for."""
    last_transition_time: Timestamp
    """Time when `status` last changed."""
    reason: Annotated[str, Text(1024, REASON_PATTERN)]
    """Cause of the status, as one CamelCase word."""
    message: Annotated[str, Text(32_768, min_length=0)]
    """Human-readable cause, with the remedy."""


class PlanSummary(Section):
    """Result of planning the spec."""

    model_name: str = ""
    """Model name that clients send in `model`."""
    former_name: str | None = None
    """Model name before the latest change of it. It is served beside the new one until `formerUntil`, and at least
    until the rollout ends."""
    former_until: Timestamp | None = None
    """Time until which `formerName` is served at least."""
    digest: str = ""
    """Digest of the engine's settings and pod template; it changes exactly when pods must be replaced."""
    engine_version: str = ""
    """Version of the engine in the pods."""
    pods_per_replica: Count = 0
    """Number of pods per replica."""
    notes: Annotated[list[str], Field(max_length=32)] = Field(default_factory=list)
    """Fields of the spec that have a consequence which is easily overlooked. The condition `FieldsSupported` names the
    fields that have no effect."""


class LoadSummary(Section):
    """Load, rounded to coarse steps and written at most every 30 seconds."""

    kv_cache_usage_percent: Annotated[int, Field(ge=0, le=100)] = 0
    """Percentage of the KV cache that running requests use."""
    requests_running: Count = 0
    """Number of requests that engines are computing."""
    requests_waiting: Count = 0
    """Number of requests that wait for an engine."""
    last_update_time: Timestamp | None = None
    """Time when these values were written."""


class Scaling(Section):
    """The latest change of the number of replicas."""

    time: Timestamp
    """Time of the decision."""
    from_replicas: Count
    """Number of replicas before the change."""
    to_replicas: Count
    """Number of replicas after the change."""
    reason: str = ""
    """Reason of the change."""


class Start(Section):
    """Duration of the latest start of a replica, by phase in milliseconds. Phases that Kubernetes reports have a
    resolution of one second."""

    time: Timestamp
    """Time when the replica became ready."""
    pod: str
    """Name of the pod."""
    schedule_ms: Count = 0
    """Time from the creation of the pod to its assignment to a node."""
    pull_ms: Count = 0
    """Time from the assignment to the start of the container: pulling the image and mounting volumes."""
    boot_ms: Count = 0
    """Remaining time until the pod is ready: starting the engine process, and the delay of the readiness probe."""
    load_ms: Count = 0
    """Time for loading the weights and allocating the KV cache."""
    warm_ms: Count = 0
    """Time for preparing kernels and measuring step times."""
    first_token_ms: Count = 0
    """Time for generating the first token."""
    total_ms: Count = 0
    """Time from the creation of the pod until it is ready."""


class RefusedAdapter(Section):
    """A replica that does not serve an adapter."""

    pod: str
    """Name of the pod."""
    reason: Annotated[str, Text(1024, REASON_PATTERN)]
    """Cause, as one CamelCase word."""
    message: Annotated[str, Text(1024, min_length=0)] = ""
    """Human-readable cause, with the remedy."""


class AdapterReplicas(Section):
    """The replicas that serve an adapter, as their engines report it. At most 32 of each kind are named."""

    loaded_replicas: Count = 0
    """Number of replicas that serve the adapter."""
    loaded: Annotated[list[str], Field(max_length=32)] = Field(default_factory=list)
    """Names of pods that serve the adapter."""
    loading: Annotated[list[str], Field(max_length=32)] = Field(default_factory=list)
    """Names of pods that fetch or read it."""
    refused: Annotated[list[RefusedAdapter], Field(max_length=32)] = Field(default_factory=list)
    """Pods that refuse it, and why."""


class AdapterSummary(AdapterReplicas):
    """One LoRA adapter of the deployment, from `spec.model.adapters` or a `LoRAAdapter`."""

    name: str
    """Name that clients send in `model`."""
    source: str = ""
    """Location of its weights."""
    pinned: bool = False
    """Whether replicas load it before they are ready."""
    reason: str = ""
    """Why no engine is asked to serve it, as one CamelCase word, such as `NameConflict`; empty: all are."""
    message: str = ""
    """Human-readable cause, with the remedy."""


class LLMDeploymentStatus(Section):
    """Observed state of the LLMDeployment."""

    observed_generation: Count = 0
    """Generation of the spec that the status describes."""
    replicas: Count = 0
    """Number of existing replicas; read by the scale subresource."""
    desired_replicas: Count = 0
    """Desired number of replicas."""
    ready_replicas: Count = 0
    """Number of replicas that accept requests."""
    standby_replicas: Count = 0
    """Number of standby replicas, which have loaded the model and sleep."""
    selector: str = ""
    """Label selector of the pods; read by the scale subresource."""
    url: str = ""
    """Base URL of the OpenAI-compatible API."""
    plan: PlanSummary | None = None
    """Result of planning the spec."""
    adapters: Annotated[list[AdapterSummary], merged_by("name", 1024)] = Field(default_factory=list)
    """LoRA adapters that the engines are asked to serve, and the replicas that do. Gateways serve these."""
    load: LoadSummary | None = None
    """Load, rounded to coarse steps."""
    last_scaling: Scaling | None = None
    """The latest change of the number of replicas."""
    last_start: Start | None = None
    """The latest measured start of a replica."""
    conditions: Annotated[list[Condition], merged_by("type", 32)] = Field(default_factory=list)
    """Conditions: Planned, Scheduled, ModelLoaded, Serving, ScalingActive, SLOMet, FieldsSupported and Ready."""
