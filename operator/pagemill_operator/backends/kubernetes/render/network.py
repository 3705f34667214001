"""Renders how engines are found and who may connect to them: a headless Service, a NetworkPolicy, a PodMonitor."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pagemill_models.sources import find_kind, in_full
from pagemill_operator.backends.kubernetes.render.names import child, engine_name, group_pods, selector
from pagemill_operator.backends.kubernetes.render.overrides import engine_override
from pagemill_operator.backends.kubernetes.snapshot import OWNER_LABEL, Manifest, Owner, RenderContext
from pagemill_operator.plan.types import Plan
from pagemill_protocol.engine_ports import (
    CONTROL_PORT,
    DATA_PORT,
    RENDEZVOUS_PORT,
    TLS_CONTROL_PORT,
    TLS_DATA_PORT,
)

PROXY_VARIABLES = frozenset({"HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"})
DNS_PORTS = (53, 5353)
"""Where cluster DNS listens: policies see the pods' port, which is not 53 on every platform (OpenShift: 5353)."""
RANK_PORTS = [
    {"protocol": "TCP", "port": RENDEZVOUS_PORT},
    {"protocol": "TCP", "port": 32768, "endPort": 60999},
]
"""Where the ranks of a group listen: that of the first pod, and free ports, which Linux takes from this range."""
SERVICE_HOST = re.compile(r"[a-z][a-z0-9-]*(\.[a-z0-9-]+(\.svc(\.[a-z0-9.-]+)?)?)?")
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
VARIANT_RELABELING = {
    "sourceLabels": ["__meta_kubernetes_namespace", "__meta_kubernetes_pod_label_pagemill_dev_deployment"],
    "separator": "/",
    "targetLabel": "variant",
}
"""Adds the label `variant` (the deployment's `namespace/name`) to engines' series, as gateways and the operator do."""


def render_service(plan: Plan, owner: Owner) -> Manifest:
    """Render the headless Service: gateways choose a pod from its EndpointSlices.

    Its ports are declared as TCP, because a service mesh that took them for HTTP might refuse the upgrade to a link.
    """
    ports = [
        {"name": name, "port": port, "targetPort": name, "protocol": "TCP", "appProtocol": "tcp"}
        for name, port in plan.groups[0].process.ports.items()
    ]
    spec = {"clusterIP": "None", "selector": selector(plan.name), "ports": ports}
    return child("v1", "Service", engine_name(plan.name), owner, spec=spec)


def render_network_policy(plan: Plan, owner: Owner, context: RenderContext) -> Manifest:
    """Render the NetworkPolicy of the engines' and the loader's pods.

    Gateways reach both ports, Prometheus the control port, and nothing else reaches either. Where replicas are kept on
    standby, the operator also reaches the control port, to wake them. Where replicas are groups, their pods reach each
    other at the ports of ranks. The pods reach DNS and, if the source is remote,
    HTTPS outside the node and the ports of a mirror and of a proxy.
    """
    # Both the TLS and the plain ports, so that a rollout that turns TLS on or off cuts no pod off.
    data, control = [_port(DATA_PORT), _port(TLS_DATA_PORT)], [_port(CONTROL_PORT), _port(TLS_CONTROL_PORT)]
    ingress = []
    if context.gateway_selector:
        gateways = _peer({NAMESPACE_LABEL: context.namespace}, context.gateway_selector)
        ingress.append({"from": [gateways], "ports": [*data, *control]})
    if context.operator_selector and plan.autoscaling is not None and plan.autoscaling.warm:
        operators = _peer({NAMESPACE_LABEL: context.namespace}, context.operator_selector)
        ingress.append({"from": [operators], "ports": control})
    if context.prometheus_namespace_selector or context.prometheus_pod_selector:
        prometheus = _peer(context.prometheus_namespace_selector, context.prometheus_pod_selector)
        ingress.append({"from": [prometheus], "ports": control})
    egress = [*_egress(plan, owner.namespace), *context.engine_extra_egress]
    if plan.pods_per_replica > 1:
        ranks = [{"podSelector": group_pods(plan.name)}]
        ingress.append({"from": ranks, "ports": RANK_PORTS})
        egress.append({"to": ranks, "ports": RANK_PORTS})
    spec = {
        "podSelector": {"matchLabels": {OWNER_LABEL: plan.name}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    return child("networking.k8s.io/v1", "NetworkPolicy", engine_name(plan.name), owner, spec=spec)


def render_pod_monitor(plan: Plan, owner: Owner, context: RenderContext) -> Manifest:
    endpoint: dict[str, Any] = {"port": "control", "path": "/metrics", "relabelings": [VARIANT_RELABELING]}
    if context.engine_tls_secret:
        authority = {"secret": {"name": context.engine_tls_secret, "key": "ca.crt"}}
        endpoint |= {"scheme": "https", "tlsConfig": {"ca": authority, "serverName": context.engine_tls_name}}
    spec = {
        "selector": {"matchLabels": selector(plan.name)},
        "podMetricsEndpoints": [endpoint],
        "podTargetLabels": [OWNER_LABEL],
    }
    return child("monitoring.coreos.com/v1", "PodMonitor", engine_name(plan.name), owner, spec=spec)


def _egress(plan: Plan, namespace: str) -> Iterator[dict[str, Any]]:
    yield {"ports": [{"protocol": protocol, "port": port} for port in DNS_PORTS for protocol in ("UDP", "TCP")]}
    sources = [] if plan.cache is not None and plan.cache.image_volume else [plan.source]
    sources += [] if plan.draft_source is None else [plan.draft_source]
    kinds = {source: find_kind(source) for source in [*sources, *(in_full(each.source) for each in plan.adapters)]}
    remote = {source: kind for source, kind in kinds.items() if kind.is_remote}
    if not remote:
        return
    group = plan.groups[0]
    given = engine_override(group.template).get("env") or []
    values = group.process.environment | {each["name"]: str(each["value"]) for each in given if each.get("value")}
    hidden = {*group.process.environment_from, *(each["name"] for each in given if each.get("valueFrom"))}
    variables = PROXY_VARIABLES.union(*(kind.variables for kind in remote.values()))
    anywhere = [
        {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}},
        {"ipBlock": {"cidr": "::/0", "except": ["fe80::/10"]}},
    ]
    if any(name.upper() in variables for name in hidden):
        yield {"to": anywhere, "ports": [{"protocol": "TCP"}]}  # the port is in a Secret
        return
    urls = [_parts(value) for name, value in values.items() if name.upper() in variables]
    source_ports = {source: kind.ports_of(source) for source, kind in remote.items()}
    ports = {443, *map(_port_of, urls), *(port for ports in source_ports.values() for port in ports)}
    yield {"to": anywhere, "ports": [_port(number) for number in sorted(ports)]}
    own = [_parts(source) for source, ports_of in source_ports.items() if ports_of]
    hosts = [url.hostname or "" for url in [*urls, *own]]
    for name in sorted({_namespace_of(host, namespace) for host in hosts} - {""}):
        # A policy sees the port of the pod behind a Service, which its clients do not know.
        yield {"to": [_peer({NAMESPACE_LABEL: name}, {})], "ports": [{"protocol": "TCP"}]}


def _parts(url: str) -> SplitResult:
    with contextlib.suppress(ValueError):
        return urlsplit(url if "://" in url else f"http://{url}")
    return urlsplit("")


def _port_of(url: SplitResult) -> int:
    with contextlib.suppress(ValueError):
        return url.port or (80 if url.scheme == "http" else 443)
    return 443


def _namespace_of(host: str, own: str) -> str:
    """Return the namespace whose Service the host may be: `hub` (of the namespace `own`), `hub.tools` or
    `hub.tools.svc` and its longer forms; empty for other names and addresses.
    """
    if not SERVICE_HOST.fullmatch(host):
        return ""
    labels = host.split(".")
    return labels[1] if len(labels) > 1 else own


def _peer(namespace_labels: Any, pod_labels: Any) -> dict[str, Any]:
    """Return a NetworkPolicy peer; empty labels select all namespaces, or all pods of the namespaces."""
    return {
        "namespaceSelector": {"matchLabels": dict(namespace_labels)} if namespace_labels else {},
        "podSelector": {"matchLabels": dict(pod_labels)} if pod_labels else {},
    }


def _port(number: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": number}
