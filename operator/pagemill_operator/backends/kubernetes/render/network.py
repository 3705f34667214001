"""How engines are found and who may speak to them: a headless Service, a NetworkPolicy, a PodMonitor."""

from __future__ import annotations

from typing import Any

from pagemill_operator.backends.kubernetes.render.names import child, engine_name, selector
from pagemill_operator.backends.kubernetes.snapshot import OWNER_LABEL, Manifest, Owner, RenderContext
from pagemill_operator.plan.types import Plan

NAMESPACE_LABEL = "kubernetes.io/metadata.name"
VARIANT_RELABELING = {
    "sourceLabels": ["__meta_kubernetes_namespace", "__meta_kubernetes_pod_label_pagemill_dev_deployment"],
    "separator": "/",
    "targetLabel": "variant",
}
"""Series of engines carry the label that gateways and operator export themselves: the deployment's `namespace/name`."""


def render_service(plan: Plan, owner: Owner) -> Manifest:
    """Headless: gateways choose a pod themselves, from its EndpointSlices."""
    ports = [
        {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
        for name, port in plan.groups[0].process.ports.items()
    ]
    spec = {"clusterIP": "None", "selector": selector(plan.name), "ports": ports}
    return child("v1", "Service", engine_name(plan.name), owner, spec=spec)


def render_network_policy(plan: Plan, owner: Owner, context: RenderContext) -> Manifest:
    """Gateways reach both ports, Prometheus the control port, and nothing else reaches any; also of the loader's pods.

    Where replicas stand by, the operator reaches the control port, too: it wakes them.
    """
    ports = plan.groups[0].process.ports
    ingress = []
    if context.gateway_selector:
        gateways = _peer({NAMESPACE_LABEL: context.namespace}, context.gateway_selector)
        ingress.append({"from": [gateways], "ports": [_port(ports["data"]), _port(ports["control"])]})
    if context.operator_selector and plan.autoscaling is not None and plan.autoscaling.warm:
        operators = _peer({NAMESPACE_LABEL: context.namespace}, context.operator_selector)
        ingress.append({"from": [operators], "ports": [_port(ports["control"])]})
    if context.prometheus_namespace_selector or context.prometheus_pod_selector:
        prometheus = _peer(context.prometheus_namespace_selector, context.prometheus_pod_selector)
        ingress.append({"from": [prometheus], "ports": [_port(ports["control"])]})
    spec = {
        "podSelector": {"matchLabels": {OWNER_LABEL: plan.name}},
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    return child("networking.k8s.io/v1", "NetworkPolicy", engine_name(plan.name), owner, spec=spec)


def render_pod_monitor(plan: Plan, owner: Owner) -> Manifest:
    spec = {
        "selector": {"matchLabels": selector(plan.name)},
        "podMetricsEndpoints": [{"port": "control", "path": "/metrics", "relabelings": [VARIANT_RELABELING]}],
        "podTargetLabels": [OWNER_LABEL],
    }
    return child("monitoring.coreos.com/v1", "PodMonitor", engine_name(plan.name), owner, spec=spec)


def _peer(namespace_labels: Any, pod_labels: Any) -> dict[str, Any]:
    """Empty labels select all namespaces, or all pods of the namespaces."""
    return {
        "namespaceSelector": {"matchLabels": dict(namespace_labels)} if namespace_labels else {},
        "podSelector": {"matchLabels": dict(pod_labels)} if pod_labels else {},
    }


def _port(number: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": number}
