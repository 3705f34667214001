"""The fields of Kubernetes objects that the gateway reads, as values that compare by content.

Decoding skips all other fields, such as most of the often changing status; a change to those is not a change here. The
defaults are those of the API.
"""

from __future__ import annotations

import msgspec

from pagemill_protocol.resource.served import WatchedSection, WatchedSpec

NO_NAMESPACE = ""


class WatchedMetadata(WatchedSection, frozen=True, kw_only=True):
    name: str = ""
    namespace: str = NO_NAMESPACE
    generation: int = 0
    labels: dict[str, str] | None = None
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None


class WatchedCondition(WatchedSection, frozen=True, kw_only=True):
    type: str
    status: str = "Unknown"
    observed_generation: int = 0
    reason: str = ""


class WatchedAdapter(WatchedSection, frozen=True, kw_only=True):
    name: str
    reason: str = ""
    """Why no engine is asked to serve it; empty: all are."""


class WatchedPlan(WatchedSection, frozen=True, kw_only=True):
    model_name: str = ""
    """Another name than the spec's: the operator has not seen its change yet."""
    former_name: str = ""
    """The name before a recent change."""


class DeploymentStatus(WatchedSection, frozen=True, kw_only=True):
    plan: WatchedPlan = WatchedPlan()
    adapters: list[WatchedAdapter] = msgspec.field(default_factory=list)
    conditions: list[WatchedCondition] = msgspec.field(default_factory=list)


class WatchedDeployment(WatchedSection, frozen=True, kw_only=True):
    metadata: WatchedMetadata
    spec: WatchedSpec = WatchedSpec()
    status: DeploymentStatus = DeploymentStatus()

    @property
    def planned(self) -> WatchedCondition | None:
        """The operator's condition Planned for the current generation; `None` if there is none yet."""
        for condition in self.status.conditions:
            if condition.type == "Planned" and condition.observed_generation >= self.metadata.generation:
                return condition
        return None


class TargetRef(WatchedSection, frozen=True, kw_only=True):
    kind: str = ""
    uid: str = ""


class EndpointConditions(WatchedSection, frozen=True, kw_only=True):
    ready: bool | None = None
    terminating: bool | None = None


class SliceEndpoint(WatchedSection, frozen=True, kw_only=True):
    addresses: list[str] = msgspec.field(default_factory=list)
    conditions: EndpointConditions = EndpointConditions()
    target_ref: TargetRef | None = None


class Port(WatchedSection, frozen=True, kw_only=True):
    name: str | None = None
    port: int | None = None


class EndpointSlice(WatchedSection, frozen=True, kw_only=True):
    metadata: WatchedMetadata
    address_type: str = "IPv4"
    endpoints: list[SliceEndpoint] | None = None
    ports: list[Port] | None = None


class Secret(WatchedSection, frozen=True, kw_only=True):
    metadata: WatchedMetadata
    data: dict[str, str] | None = None
    """The values in base64."""
