"""Renders the engine's pod template: container, volumes, placement, and the resource's overrides on top."""

from __future__ import annotations

import math
from typing import Any

from pagemill_operator.backends.kubernetes.render.config import settings_text
from pagemill_operator.backends.kubernetes.render.container import engine_container
from pagemill_operator.backends.kubernetes.render.loader import loader_container
from pagemill_operator.backends.kubernetes.render.model import model_volume
from pagemill_operator.backends.kubernetes.render.names import (
    TEMPLATE_ANNOTATION,
    adapters_name,
    config_name,
    digest,
    labels,
    selector,
    token_name,
)
from pagemill_operator.backends.kubernetes.render.overrides import merge
from pagemill_operator.backends.kubernetes.render.placement import (
    SPREAD_OVER,
    common_spec,
    placement,
    pull_secrets,
    same_node,
)
from pagemill_operator.backends.kubernetes.snapshot import Manifest, RenderContext
from pagemill_operator.plan.pod_template import GRACE_MARGIN_S
from pagemill_operator.plan.types import Plan


def engine_template(plan: Plan, context: RenderContext) -> Manifest:
    """Return the template with its own digest as an annotation."""
    own = {"metadata": {"labels": labels(plan.name), "annotations": {}}, "spec": _pod_spec(plan, context)}
    template: Manifest = merge(own, plan.groups[0].template)
    template["metadata"]["annotations"] |= {TEMPLATE_ANNOTATION: digest(template, 16)}
    return template


def _pod_spec(plan: Plan, context: RenderContext) -> dict[str, Any]:
    process = plan.groups[0].process
    return {
        **common_spec(context),
        **pull_secrets(plan, context),
        **placement(process),
        **same_node(plan),
        **_loaders(plan, context),
        "containers": [engine_container(plan, context)],
        "terminationGracePeriodSeconds": math.ceil(process.drain_timeout_s) + GRACE_MARGIN_S,
        "topologySpreadConstraints": [_spread(plan.name, key) for key in SPREAD_OVER],
        "volumes": _volumes(plan, context),
    }


def _loaders(plan: Plan, context: RenderContext) -> dict[str, Any]:
    """Return the init containers: the first pod on a node fills the node's folder, and the others wait for it."""
    by_pods = plan.cache is not None and plan.cache.host_path is not None
    return {"initContainers": [loader_container(plan, context)]} if by_pods else {}


def _spread(name: str, topology_key: str) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": topology_key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(name)},
        "matchLabelKeys": ["pod-template-hash"],
    }


def _volumes(plan: Plan, context: RenderContext) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "settings", "configMap": {"name": config_name(plan.name, settings_text(plan, context))}},
        # Readable by the pod's group only.
        {"name": "token", "secret": {"secretName": token_name(plan.name), "defaultMode": 0o440}},
    ]
    if plan.serves_adapters:
        volumes.append({"name": "adapters", "configMap": {"name": adapters_name(plan.name)}})
    if context.engine_tls_secret:
        items = [{"key": name, "path": name} for name in ("tls.crt", "tls.key")]
        secret = {"secretName": context.engine_tls_secret, "items": items, "defaultMode": 0o440}
        volumes.append({"name": "engine-tls", "secret": secret})
    if volume := model_volume(plan, writable=False):
        volumes.append(volume)
    return [*volumes, {"name": "tmp", "emptyDir": {}}]
