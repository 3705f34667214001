"""`status`: what the operator observed. Conditions, not phases; nothing that changes every second.

Sources: the Kubernetes API conventions on conditions (a list-map keyed by type, absent means Unknown).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pagemill_crds.base import Section
from pagemill_crds.fields import Text

ConditionType = Literal["Planned", "Scheduled", "ModelLoaded", "Serving", "ScalingActive", "SLOMet", "Ready"]
REASON_PATTERN = r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
TYPE_PATTERN = r"^[A-Za-z]([A-Za-z0-9]*)$"

Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Count = Annotated[int, Field(ge=0)]


class Condition(Section):
    """One observation about the deployment."""

    # Not an enumeration: an older schema must keep the conditions of a newer operator.
    type: Annotated[str, Text(316, TYPE_PATTERN)]
    """Planned, Scheduled, ModelLoaded, Serving, ScalingActive, SLOMet or Ready."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: Count = 0
    """Generation of the spec it was observed on."""
    last_transition_time: Timestamp
    """When `status` last changed."""
    reason: Annotated[str, Text(1024, REASON_PATTERN)]
    """The true cause, in one CamelCase word."""
    message: Annotated[str, Text(32_768, min_length=0)]
    """The cause for people, with the remedy."""


class PlanSummary(Section):
    """What the spec was planned into."""

    model_name: str = ""
    """Name that clients put into `model`."""
    digest: str = ""
    """Changes exactly when pods must be replaced."""
    engine_version: str = ""
    """Version of the engine in the pods."""
    pods_per_replica: Count = 0
    """Pods that make one replica."""
    notes: Annotated[list[str], Field(max_length=32)] = Field(default_factory=list)
    """Fields that have no effect here, and why."""


class LoadSummary(Section):
    """Load in coarse steps; written at most every 30 seconds."""

    kv_cache_usage_percent: Annotated[int, Field(ge=0, le=100)] = 0
    """Share of the KV cache held by running requests."""
    requests_running: Count = 0
    """Requests in the engines."""
    requests_waiting: Count = 0
    """Requests that wait for an engine."""
    last_update_time: Timestamp | None = None
    """When these values were written."""


class Scaling(Section):
    """The latest change of the number of replicas."""

    time: Timestamp
    """When it was decided."""
    from_replicas: Count
    """Replicas before."""
    to_replicas: Count
    """Replicas after."""
    reason: str = ""
    """Why."""


class Start(Section):
    """The latest start of a replica, by phase in milliseconds. Times of Kubernetes have whole seconds."""

    time: Timestamp
    """When it was ready."""
    pod: str
    """Its pod."""
    schedule_ms: Count = 0
    """Until it had a node."""
    pull_ms: Count = 0
    """Until its container ran: the image, and volumes."""
    boot_ms: Count = 0
    """Until the engine looked at the model, and until the kubelet saw that it was ready."""
    load_ms: Count = 0
    """Weights and KV cache."""
    warm_ms: Count = 0
    """Kernels, and the measuring of step times."""
    first_token_ms: Count = 0
    """The first token."""
    total_ms: Count = 0
    """All of it."""


class LLMDeploymentStatus(Section):
    """What the operator observed."""

    observed_generation: Count = 0
    """Generation of the spec that the status is about."""
    replicas: Count = 0
    """Replicas that exist; read by the scale subresource."""
    desired_replicas: Count = 0
    """Replicas that are wanted now."""
    ready_replicas: Count = 0
    """Replicas that take requests."""
    standby_replicas: Count = 0
    """Replicas that are loaded and sleep."""
    selector: str = ""
    """Label selector of the pods; read by the scale subresource."""
    url: str = ""
    """Base URL of the OpenAI-compatible API."""
    plan: PlanSummary | None = None
    """What the spec was planned into."""
    load: LoadSummary | None = None
    """Load in coarse steps."""
    last_scaling: Scaling | None = None
    """The latest change of the number of replicas."""
    last_start: Start | None = None
    """The latest start of a replica that was measured."""
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=32,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = Field(default_factory=list)
    """Observations: Planned, Scheduled, ModelLoaded, Serving, ScalingActive, SLOMet and Ready."""
