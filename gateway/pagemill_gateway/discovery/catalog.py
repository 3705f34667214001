"""Decodes and checks the catalogue of the settings file or of `PUT /catalog`."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from pagemill_protocol.catalog import Catalog, CatalogModel
from pagemill_protocol.errors import PagemillError, invalid_field

MAX_MODELS = 10_000
MAX_ENDPOINTS = 1024
"""Limit for the endpoints of all models; each has a state stream."""


def decode_catalog(raw: bytes) -> Catalog:
    """Decode and check a catalogue. Raises `PagemillError` 400 that names the invalid part."""
    try:
        catalog = msgspec.json.decode(raw, type=Catalog)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PagemillError(f"The catalogue cannot be read: {error}.", code="invalid_catalog") from error
    check_catalog(catalog)
    return catalog


def check_catalog(catalog: Catalog) -> None:
    """Raise `PagemillError` 400 for the first invalid part of the catalogue."""
    num_endpoints = sum(len(model.endpoints) for model in catalog.models)
    for what, number, most in (
        ("models", len(catalog.models), MAX_MODELS),
        ("endpoints", num_endpoints, MAX_ENDPOINTS),
    ):
        if number > most:
            raise invalid_field(
                "models", f"The catalogue has {number} {what}; at most {most} are taken. Use more gateways."
            )
    deployments: set[tuple[str, str]] = set()
    endpoint_ids: set[str] = set()
    for index, model in enumerate(catalog.models):
        where = f"models[{index}]"
        key = (model.namespace, model.deployment)
        if key in deployments:
            raise invalid_field(where, f"{where}: {'/'.join(key)} is listed twice. Give each deployment one entry.")
        deployments.add(key)
        _check_model(model, where, endpoint_ids)


def _check_model(model: CatalogModel, where: str, endpoint_ids: set[str]) -> None:
    if not model.name or "" in model.aliases:
        raise invalid_field(f"{where}.name", f"{where}: a name or alias is empty. Clients need one to ask for.")
    names = [model.name, *model.aliases]
    for index, adapter in enumerate(model.adapters):
        if not adapter or adapter in names:
            raise invalid_field(
                f"{where}.adapters[{index}]",
                f"{where}.adapters[{index}] {adapter!r}: it needs a name that nothing else here has.",
            )
        names.append(adapter)
    if model.share < 0:
        raise invalid_field(f"{where}.weight", f"{where}.weight is {model.weight}; it must be 0 or more.")
    queue = model.queue
    if queue is not None and (queue.max_requests < 0 or queue.max_bytes < 0 or queue.timeout_s < 0):
        raise invalid_field(
            f"{where}.queue", f"{where}.queue: max_requests, max_bytes and timeout_s must be 0 or more."
        )
    for index, endpoint in enumerate(model.endpoints):
        field = f"{where}.endpoints[{index}]"
        if not endpoint.id or endpoint.id in endpoint_ids:
            raise invalid_field(f"{field}.id", f"{field}.id {endpoint.id!r} is empty or listed twice.")
        endpoint_ids.add(endpoint.id)
        for name, url in (("data_url", endpoint.data_url), ("control_url", endpoint.control_url)):
            if not _is_base_url(url):
                raise invalid_field(f"{field}.{name}", f"{field}.{name} {url!r} must be like http://10.0.0.1:8000.")


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.path.strip("/")
        )
    except ValueError:
        return False
