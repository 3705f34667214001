"""The catalogue of a gateway: the models it serves and the endpoints of their engines.

Written by discovery (the local backend, or a watcher of the cluster's objects) and read by the gateway's routing.
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
    """Accepts no new requests."""
    probed_ready: bool = False
    """The platform's own probe reports that the pod is ready: connect at once, whatever its last report said."""


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of one deployment may wait in a gateway, and for how long."""

    max_requests: int
    max_bytes: int
    """Bytes of request bodies."""
    timeout_s: float


class CatalogAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """One LoRA adapter served beside a model."""

    name: str
    """Name that clients send."""
    digest: str
    """Digest of its content: identifies it to engines and separates its KV blocks."""


DEFAULT_WEIGHT = 100
"""The weight of a deployment whose `spec.routing.weight` is not set."""


class CatalogModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One LLMDeployment as the gateway serves it."""

    namespace: str = "default"
    deployment: str
    name: str
    """Name that clients send."""
    aliases: list[str] = []
    takes_names: bool = False
    """Whether the other names that its engines report (`StateFrame.models`) lead to it too, unless the catalogue has
    them. For engines without an operator: an engine could take the name of another model."""
    adapters: list[CatalogAdapter] = []
    weight: int = DEFAULT_WEIGHT
    """Share of the requests for this name among the deployments that claim it."""
    engine_token: str = ""
    """Bearer token for `/internal/*` of its engines."""
    prefix_scope: str = "tenant"
    """Which callers share cached prompts: `tenant`, `key`, or `deployment` (all)."""
    routing_policy: str = "Auto"
    """How requests are distributed over the endpoints. `Auto`, like any name the gateway does not know, means the
    default policy."""
    session_header: str = ""
    """Request header that names a session; empty: none."""
    chat_template: str | None = None
    """Overrides the bundle's template."""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    """Names of parsers in `pagemill_api.answers.registry`; `auto`: the parser that fits the chat template."""
    queue: QueueLimits | None = None
    """`None`: the gateway's own limits apply."""
    wakes: bool = False
    """Whether waiting requests start an engine: they may wait although none is running."""
    endpoints: list[Endpoint] = []


class Catalog(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything one gateway serves. Sent whole; a newer one replaces it."""

    models: list[CatalogModel] = []
