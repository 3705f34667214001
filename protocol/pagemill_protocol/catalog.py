"""The gateway's view of what it serves: models and the endpoints of their engines.

Written by whoever discovers (the local backend, or a watcher of the cluster's objects), read by the gateway's brain.
"""

from __future__ import annotations

import msgspec


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine pod or process."""

    id: str
    """Stable for the life of the pod: pod UID, or `name-ordinal-pid`."""
    data_url: str
    """For example `http://127.0.0.1:8000`."""
    control_url: str
    terminating: bool = False
    """Takes no new request."""
    probed_ready: bool = False
    """The platform's own probe says that it is ready: worth asking at once, whatever it said before."""


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of one deployment may wait in a gateway, and how long."""

    max_requests: int
    max_bytes: int
    """Of request bodies."""
    timeout_s: float


class CatalogAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """One LoRA adapter served beside a model."""

    name: str
    """By which clients ask for it."""
    digest: str
    """Of its content: what engines call it by, and what keeps its KV blocks apart."""


class CatalogModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One LLMDeployment as the gateway serves it."""

    namespace: str = "default"
    deployment: str
    name: str
    """The name clients use."""
    aliases: list[str] = []
    adapters: list[CatalogAdapter] = []
    weight: int = 100
    """Share of the requests for this name among the deployments that claim it."""
    engine_token: str = ""
    """Bearer token for `/internal/*` of its engines."""
    prefix_scope: str = "deployment"
    routing_policy: str = "Auto"
    """How requests are spread over the endpoints; `Auto`, and a name the gateway does not know: as it sees fit."""
    session_header: str = ""
    """Request header that names a session; empty: none."""
    chat_template: str | None = None
    """Overrides the bundle's template."""
    queue: QueueLimits | None = None
    """`None`: the gateway's own."""
    wakes: bool = False
    """Somebody starts an engine when requests wait: then they do, also while there is none."""
    endpoints: list[Endpoint] = []


class Catalog(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything one gateway serves. Sent whole; a newer one replaces it."""

    models: list[CatalogModel] = []
