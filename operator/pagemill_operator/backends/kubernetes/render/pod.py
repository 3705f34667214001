"""The engine's pod template: container, volumes, where it may run, and the resource's overrides over all that."""

from __future__ import annotations

import math
from typing import Any

from pagemill_operator.backends.kubernetes.render.config import settings_text
from pagemill_operator.backends.kubernetes.render.container import GPU, engine_container
from pagemill_operator.backends.kubernetes.render.model import keeps_kernels, model_claim
from pagemill_operator.backends.kubernetes.render.names import (
    TEMPLATE_ANNOTATION,
    config_name,
    digest,
    labels,
    selector,
    token_name,
)
from pagemill_operator.backends.kubernetes.render.overrides import merge
from pagemill_operator.backends.kubernetes.render.security import pod_security
from pagemill_operator.backends.kubernetes.snapshot import OWNER_LABEL, Manifest, RenderContext
from pagemill_operator.plan.pod_template import GRACE_MARGIN_S
from pagemill_operator.plan.types import Plan, Process

GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
SPREAD_OVER = ("kubernetes.io/hostname", "topology.kubernetes.io/zone")


def engine_template(plan: Plan, context: RenderContext) -> Manifest:
    """The template, with its own digest as an annotation."""
    own = {"metadata": {"labels": labels(plan.name), "annotations": {}}, "spec": _pod_spec(plan, context)}
    template: Manifest = merge(own, plan.groups[0].template)
    template["metadata"]["annotations"] |= {TEMPLATE_ANNOTATION: digest(template, 16)}
    return template


def placement(process: Process) -> dict[str, Any]:
    """Which nodes can take a pod of this process."""
    if not process.gpus:
        return {}
    place: dict[str, Any] = {"tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]}
    if process.gpu_product:
        place["nodeSelector"] = {GPU_PRODUCT_LABEL: process.gpu_product}
    return place


def same_node(plan: Plan) -> dict[str, Any]:
    """A volume that one node mounts keeps all pods there, from the loader to the new ones of a rollout."""
    if plan.cache is None or plan.cache.claim_name is not None or plan.cache.access_mode != "ReadWriteOnce":
        return {}
    term = {"labelSelector": {"matchLabels": {OWNER_LABEL: plan.name}}, "topologyKey": SPREAD_OVER[0]}
    return {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}


def common_spec(context: RenderContext) -> dict[str, Any]:
    """What every pod of ours has."""
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
    }
    if context.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in context.image_pull_secrets]
    return spec


def _pod_spec(plan: Plan, context: RenderContext) -> dict[str, Any]:
    process = plan.groups[0].process
    return {
        **common_spec(context),
        **placement(process),
        **same_node(plan),
        "containers": [engine_container(plan, context)],
        "terminationGracePeriodSeconds": math.ceil(process.drain_timeout_s) + GRACE_MARGIN_S,
        "topologySpreadConstraints": [_spread(plan.name, key) for key in SPREAD_OVER],
        "volumes": _volumes(plan, context),
    }


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
    if context.engine_tls_secret:
        items = [{"key": name, "path": name} for name in ("tls.crt", "tls.key")]
        secret = {"secretName": context.engine_tls_secret, "items": items, "defaultMode": 0o440}
        volumes.append({"name": "engine-tls", "secret": secret})
    if claim := model_claim(plan):
        source = {"claimName": claim} if keeps_kernels(plan) else {"claimName": claim, "readOnly": True}
        volumes.append({"name": "model", "persistentVolumeClaim": source})
    return [*volumes, {"name": "tmp", "emptyDir": {}}]
