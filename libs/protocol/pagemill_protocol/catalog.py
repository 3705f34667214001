"""The catalogue of a gateway: the models it serves and the endpoints of their engines.

Written by discovery (the local backend, or a watcher of the cluster's objects) and read by the gateway's routing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pagemill_protocol.resource.served import ServedModel


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


class CatalogModel(ServedModel, frozen=True, kw_only=True, omit_defaults=True):
    """One LLMDeployment as the gateway serves it."""

    namespace: str = "default"
    deployment: str
    takes_names: bool = False
    """Whether the other names that its engines report, of models and adapters, lead to it too, unless the catalogue has
    them. For engines without an operator: an engine could take the name of another model."""
    adapters: list[str] = msgspec.field(default_factory=list)
    """Names of the LoRA adapters that its engines are asked to serve. Which content a name stands for, engines report
    (`report.adapters`)."""
    engine_token: str = ""
    """Bearer token for `/internal/*` of its engines."""
    wakes: bool = False
    """Whether waiting requests start an engine: they may wait although none is running."""
    endpoints: list[Endpoint] = msgspec.field(default_factory=list)


def catalog_model(served: ServedModel, **fields: Any) -> CatalogModel:
    """Return the entry of a deployment with what it serves and these fields of `CatalogModel`."""
    return CatalogModel(**{name: getattr(served, name) for name in ServedModel.__struct_fields__}, **fields)


class Catalog(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything one gateway serves. Sent whole; a newer one replaces it."""

    models: list[CatalogModel] = []
