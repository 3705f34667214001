"""Builds the catalogue from watched objects. Pure; the result does not depend on the order of the objects.

A deployment whose spec the operator refused (condition Planned is False for this generation) is left out unless pods of
an earlier spec still run. A deployment whose name belongs to an older one is always left out. The operator applies the
same rule, but until then a gateway must not send the older deployment's requests to the younger one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from pagemill_gateway.discovery.kubernetes.objects import EndpointSlice, SliceEndpoint, WatchedDeployment
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint, catalog_model
from pagemill_protocol.engine_ports import engine_url
from pagemill_protocol.engine_token import EngineKeys
from pagemill_protocol.resource.served import name_owners, served_model

DEPLOYMENT_LABEL = "pagemill.dev/deployment"
DATA_PORT, CONTROL_PORT = "data", "control"
SCALED_ON_DEMAND = ("Active", "External")
"""The autoscaling modes in which waiting requests start an engine, by the operator or by another autoscaler."""
_ADDRESS_PREFERENCE = {"IPv4": 0, "IPv6": 1}


def build_catalog(
    deployments: Iterable[WatchedDeployment], slices: Iterable[EndpointSlice], keys: EngineKeys | None
) -> Catalog:
    """Return the catalogue. `keys` is `None` while they are unknown; engines refuse requests without a token."""
    endpoints = _endpoints_by_deployment(slices)
    kept = [each for each in sorted(deployments, key=_age) if each.metadata.deletion_timestamp is None]
    models = []
    claims = [_Claim(each) for each in kept]
    claimed = {name for claim in claims for name in claim.names}
    for claim, taken in name_owners(claims):
        found = endpoints.get((claim.deployment.metadata.namespace, claim.deployment.metadata.name), [])
        if taken is None and _is_served(claim.deployment, bool(found)):
            models.append(_model(claim, found, keys, _former_names(claim, claimed)))
    return Catalog(models=models)


class _Claim:
    """A deployment with the names that it asks for."""

    def __init__(self, deployment: WatchedDeployment) -> None:
        self.deployment = deployment
        self.served = served_model(deployment.metadata.name, deployment.spec)
        self.key = f"{deployment.metadata.namespace}/{deployment.metadata.name}"
        self.names, self.weight = self.served.names, self.served.weight


def _former_names(claim: _Claim, claimed: set[str]) -> list[str]:
    """Return the model's names before the spec changed them, which clients may send for a while; none that a deployment
    claims."""
    plan = claim.deployment.status.plan
    names = [name for name in dict.fromkeys((plan.model_name, plan.former_name)) if name and name not in claimed]
    claimed.update(names)
    return names


def _is_served(deployment: WatchedDeployment, has_pods: bool) -> bool:
    planned = deployment.planned
    if planned is None or planned.status != "False":
        return True
    return has_pods and planned.reason != "NameConflict"


def _age(deployment: WatchedDeployment) -> tuple[str, str, str]:
    """Return the sort key for age; times in RFC 3339 and UTC sort as text."""
    metadata = deployment.metadata
    return metadata.creation_timestamp, metadata.namespace, metadata.name


def _model(claim: _Claim, endpoints: list[Endpoint], keys: EngineKeys | None, former: list[str]) -> CatalogModel:
    metadata, autoscaling = claim.deployment.metadata, claim.deployment.spec.autoscaling
    return catalog_model(
        msgspec.structs.replace(claim.served, aliases=[*claim.served.aliases, *former]),
        namespace=metadata.namespace,
        deployment=metadata.name,
        engine_token=keys.sent(metadata.namespace, metadata.name) if keys is not None else "",
        wakes=autoscaling is not None and autoscaling.mode in SCALED_ON_DEMAND,
        adapters=[each.name for each in claim.deployment.status.adapters if not each.reason],
        endpoints=endpoints,
    )


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
