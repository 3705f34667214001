"""Renders what the pods of engines and loaders share: node placement and security."""

from __future__ import annotations

from typing import Any

from pagemill_operator.backends.kubernetes.render.container import GPU
from pagemill_operator.backends.kubernetes.render.security import pod_security
from pagemill_operator.backends.kubernetes.snapshot import OWNER_LABEL, RenderContext
from pagemill_operator.plan.types import Plan, Process

GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
GPU_LABELS = (
    "nvidia.com/gpu.present",
    GPU_PRODUCT_LABEL,
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
"""Labels of nodes with a GPU: of NVIDIA's feature discovery, and of clouds' node pools."""
SPREAD_OVER = ("kubernetes.io/hostname", "topology.kubernetes.io/zone")


def placement(process: Process) -> dict[str, Any]:
    """Return the tolerations and the node selector that a process needs."""
    if not process.gpus:
        return {}
    place: dict[str, Any] = {"tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]}
    if process.gpu_product:
        place["nodeSelector"] = {GPU_PRODUCT_LABEL: process.gpu_product}
    return place


def same_node(plan: Plan) -> dict[str, Any]:
    """Return the affinity that keeps all pods, the loader's too, on one node if only one node can mount the volume."""
    cache = plan.cache
    if cache is None or cache.size is None or cache.access_mode != "ReadWriteOnce":
        return {}
    term = {"labelSelector": {"matchLabels": {OWNER_LABEL: plan.name}}, "topologyKey": SPREAD_OVER[0]}
    return {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}


def loader_placement(plan: Plan) -> dict[str, Any]:
    """Return where a loader runs that fills a claim.

    The volume of a claim may be made where its first pod runs, so the loader runs where engines can: it tolerates what
    they tolerate, and prefers nodes with a GPU if they need one, without asking for it.
    """
    process = plan.groups[0].process
    place = {**placement(process), **same_node(plan)}
    if process.gpus and not process.gpu_product:
        terms = [
            {"weight": 100, "preference": {"matchExpressions": [{"key": label, "operator": "Exists"}]}}
            for label in GPU_LABELS
        ]
        node = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}}
        place["affinity"] = {**place.get("affinity", {}), **node}
    return place


def common_spec(context: RenderContext) -> dict[str, Any]:
    """Return the fields that every pod has."""
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(context.engine_ids),
    }
    if context.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in context.image_pull_secrets]
    return spec


def pull_secrets(plan: Plan, context: RenderContext) -> dict[str, Any]:
    """Return the pull secrets of a pod whose model is an image volume: the kubelet pulls it with the model's
    credentials.
    """
    if plan.cache is None or not plan.cache.image_volume or plan.credentials is None:
        return {}
    names = [*context.image_pull_secrets, plan.credentials.name]
    return {"imagePullSecrets": [{"name": name} for name in dict.fromkeys(names)]}
