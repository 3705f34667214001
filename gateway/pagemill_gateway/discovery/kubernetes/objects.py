"""The fields of Kubernetes objects that the gateway reads, as values that compare by content.

Decoding skips all other fields, such as most of the often changing status; a change to those is not a change here. The
defaults are those of the API.
"""

from __future__ import annotations

import msgspec

NO_NAMESPACE = ""


class Struct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The base of all objects: fields in snake case, keys in camel case."""


class WatchedMetadata(Struct, frozen=True, kw_only=True):
    name: str = ""
    namespace: str = NO_NAMESPACE
    generation: int = 0
    labels: dict[str, str] | None = None
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None


class WatchedModel(Struct, frozen=True, kw_only=True):
    name: str | None = None
    aliases: list[str] = []
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


class WatchedPrefixCaching(Struct, frozen=True, kw_only=True):
    scope: str = "tenant"


class WatchedEngine(Struct, frozen=True, kw_only=True):
    prefix_caching: WatchedPrefixCaching = WatchedPrefixCaching()


class WatchedQueue(Struct, frozen=True, kw_only=True):
    max_requests: int = 1000
    max_bytes: int | str = "256Mi"
    timeout: str = "60s"


class Routing(Struct, frozen=True, kw_only=True):
    policy: str = "Auto"
    session_header: str | None = None
    weight: int | None = None
    queue: WatchedQueue | None = None


class WatchedAutoscaling(Struct, frozen=True, kw_only=True):
    mode: str = "Active"


class DeploymentSpec(Struct, frozen=True, kw_only=True):
    model: WatchedModel = WatchedModel()
    engine: WatchedEngine = WatchedEngine()
    routing: Routing = Routing()
    autoscaling: WatchedAutoscaling | None = None


class WatchedCondition(Struct, frozen=True, kw_only=True):
    type: str
    status: str = "Unknown"
    observed_generation: int = 0
    reason: str = ""


class DeploymentStatus(Struct, frozen=True, kw_only=True):
    conditions: list[WatchedCondition] = []


class WatchedDeployment(Struct, frozen=True, kw_only=True):
    metadata: WatchedMetadata
    spec: DeploymentSpec = DeploymentSpec()
    status: DeploymentStatus = DeploymentStatus()

    @property
    def planned(self) -> WatchedCondition | None:
        """The operator's condition Planned for the current generation; `None` if there is none yet."""
        for condition in self.status.conditions:
            if condition.type == "Planned" and condition.observed_generation >= self.metadata.generation:
                return condition
        return None


class TargetRef(Struct, frozen=True, kw_only=True):
    kind: str = ""
    uid: str = ""


class EndpointConditions(Struct, frozen=True, kw_only=True):
    ready: bool | None = None
    terminating: bool | None = None


class SliceEndpoint(Struct, frozen=True, kw_only=True):
    addresses: list[str] = []
    conditions: EndpointConditions = EndpointConditions()
    target_ref: TargetRef | None = None


class Port(Struct, frozen=True, kw_only=True):
    name: str | None = None
    port: int | None = None


class EndpointSlice(Struct, frozen=True, kw_only=True):
    metadata: WatchedMetadata
    address_type: str = "IPv4"
    endpoints: list[SliceEndpoint] | None = None
    ports: list[Port] | None = None


class Secret(Struct, frozen=True, kw_only=True):
    metadata: WatchedMetadata
    data: dict[str, str] | None = None
    """The values in base64."""
