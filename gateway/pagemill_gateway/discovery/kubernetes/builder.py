"""Builds the catalogue from watched objects. Pure; the result does not depend on the order of the objects.

A deployment whose spec the operator refused (condition Planned is False for this generation) is left out unless pods of
an earlier spec still run. A deployment whose name belongs to an older one is always left out. The operator applies the
same rule, but until then a gateway must not send the older deployment's requests to the younger one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import NamedTuple

from pagemill_gateway.discovery.kubernetes.objects import EndpointSlice, SliceEndpoint, WatchedDeployment, WatchedQueue
from pagemill_protocol.catalog import DEFAULT_WEIGHT, Catalog, CatalogModel, Endpoint, QueueLimits
from pagemill_protocol.engine_ports import engine_url
from pagemill_protocol.engine_token import EngineKeys

DEPLOYMENT_LABEL = "pagemill.dev/deployment"
DATA_PORT, CONTROL_PORT = "data", "control"
SCALED_ON_DEMAND = ("Active", "External")
"""The autoscaling modes in which waiting requests start an engine, by the operator or by another autoscaler."""
_ADDRESS_PREFERENCE = {"IPv4": 0, "IPv6": 1}
# Kubernetes quantities and durations, as in `pagemill_crds.quantities`, which is not installed with the gateway. A test
# compares the two.
_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h))+")
_DURATION_PART = re.compile(r"([0-9.]+)(ms|s|m|h)")
_FACTORS = {unit: 10 ** (3 * power) for power, unit in enumerate(("k", "M", "G", "T", "P"), 1)}
_FACTORS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate(("K", "M", "G", "T", "P"), 1)}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def build_catalog(
    deployments: Iterable[WatchedDeployment], slices: Iterable[EndpointSlice], keys: EngineKeys | None
) -> Catalog:
    """Return the catalogue. `keys` is `None` while they are unknown; engines refuse requests without a token."""
    endpoints = _endpoints_by_deployment(slices)
    oldest_first = sorted(deployments, key=_age)
    models = []
    for deployment in _without_conflicts(oldest_first):
        found = endpoints.get((deployment.metadata.namespace, deployment.metadata.name), [])
        if _is_served(deployment, bool(found)):
            models.append(_model(deployment, found, keys))
    return Catalog(models=models)


def _is_served(deployment: WatchedDeployment, has_pods: bool) -> bool:
    if deployment.metadata.deletion_timestamp is not None:
        return False
    planned = deployment.planned
    if planned is None or planned.status != "False":
        return True
    return has_pods and planned.reason != "NameConflict"


def _without_conflicts(oldest_first: list[WatchedDeployment]) -> Iterator[WatchedDeployment]:
    """Yield the deployments that own their names, alone or shared by weights."""
    holders: dict[str, WatchedDeployment] = {}
    for deployment in oldest_first:
        if deployment.metadata.deletion_timestamp is not None:
            continue
        rivals = [holders[name] for name in _names(deployment) if name in holders]
        shares = deployment.spec.routing.weight is not None
        if any(not shares or rival.spec.routing.weight is None for rival in rivals):
            continue
        for name in _names(deployment):
            holders.setdefault(name, deployment)
        yield deployment


def _names(deployment: WatchedDeployment) -> list[str]:
    return [_model_name(deployment), *deployment.spec.model.aliases]


def _model_name(deployment: WatchedDeployment) -> str:
    return deployment.spec.model.name or deployment.metadata.name


def _age(deployment: WatchedDeployment) -> tuple[str, str, str]:
    """Return the sort key for age; times in RFC 3339 and UTC sort as text."""
    metadata = deployment.metadata
    return metadata.creation_timestamp, metadata.namespace, metadata.name


def _model(deployment: WatchedDeployment, endpoints: list[Endpoint], keys: EngineKeys | None) -> CatalogModel:
    metadata, spec = deployment.metadata, deployment.spec
    return CatalogModel(
        namespace=metadata.namespace,
        deployment=metadata.name,
        name=_model_name(deployment),
        aliases=spec.model.aliases,
        weight=DEFAULT_WEIGHT if spec.routing.weight is None else spec.routing.weight,
        engine_token=keys.sent(metadata.namespace, metadata.name) if keys is not None else "",
        routing_policy=spec.routing.policy,
        session_header=spec.routing.session_header or "",
        prefix_scope=spec.engine.prefix_caching.scope,
        chat_template=spec.model.chat_template,
        tool_call_parser=spec.model.tool_call_parser,
        reasoning_parser=spec.model.reasoning_parser,
        queue=_queue_limits(spec.routing.queue),
        wakes=spec.autoscaling is not None and spec.autoscaling.mode in SCALED_ON_DEMAND,
        endpoints=endpoints,
    )


def _queue_limits(queue: WatchedQueue | None) -> QueueLimits | None:
    """Return the queue's limits; None, for the gateway's own, if they are missing or invalid."""
    if queue is None:
        return None
    max_bytes, timeout_s = memory_bytes(queue.max_bytes), duration_seconds(queue.timeout)
    if max_bytes is None or timeout_s is None or min(max_bytes, queue.max_requests) < 0:
        return None
    return QueueLimits(max_requests=queue.max_requests, max_bytes=max_bytes, timeout_s=timeout_s)


class _Found(NamedTuple):
    """A pod in one EndpointSlice."""

    address_type: str
    address: str
    ports: tuple[int, int]
    terminating: bool
    ready: bool


def _endpoints_by_deployment(slices: Iterable[EndpointSlice]) -> dict[tuple[str, str], list[Endpoint]]:
    pods: defaultdict[tuple[str, str], defaultdict[str, list[_Found]]] = defaultdict(lambda: defaultdict(list))
    for each in slices:
        deployment = (each.metadata.labels or {}).get(DEPLOYMENT_LABEL)
        ports = _ports(each)
        if deployment is None or ports is None or each.address_type not in _ADDRESS_PREFERENCE:
            continue
        for endpoint in each.endpoints or []:
            if endpoint.target_ref is not None and endpoint.target_ref.kind == "Pod" and endpoint.addresses:
                found = _found(each.address_type, endpoint, ports)
                pods[each.metadata.namespace, deployment][endpoint.target_ref.uid].append(found)
    return {key: [_endpoint(uid, found) for uid, found in sorted(by_uid.items())] for key, by_uid in pods.items()}


def _ports(endpoint_slice: EndpointSlice) -> tuple[int, int] | None:
    ports = {port.name: port.port for port in endpoint_slice.ports or []}
    data, control = ports.get(DATA_PORT), ports.get(CONTROL_PORT)
    return (data, control) if data and control else None


def _found(address_type: str, endpoint: SliceEndpoint, ports: tuple[int, int]) -> _Found:
    conditions = endpoint.conditions
    return _Found(
        address_type, endpoint.addresses[0], ports, conditions.terminating is True, conditions.ready is not False
    )


def _endpoint(uid: str, found: list[_Found]) -> Endpoint:
    """Return the endpoint of a pod, which may be in several slices: one per address family, and briefly in two."""
    first = min(found, key=lambda each: (_ADDRESS_PREFERENCE[each.address_type], each.address))
    data_port, control_port = first.ports
    terminating = any(each.terminating for each in found)
    return Endpoint(
        id=uid,
        data_url=engine_url(first.address, data_port),
        control_url=engine_url(first.address, control_port),
        terminating=terminating,
        probed_ready=not terminating and any(each.ready for each in found),
    )


def memory_bytes(quantity: int | str) -> int | None:
    """Parse a quantity: `"256Mi"` is 268435456. Return None if it is invalid."""
    if isinstance(quantity, int):
        return quantity
    match = _MEMORY.fullmatch(quantity)
    return int(Decimal(match[1]) * _FACTORS.get(match[2], 1)) if match else None


def duration_seconds(duration: str) -> float | None:
    """Parse a duration: `"1m30s"` is 90.0. Return None if it is invalid."""
    if not _DURATION.fullmatch(duration):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(duration))
