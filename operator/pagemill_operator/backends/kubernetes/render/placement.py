"""What the pods of engines and loaders share: which nodes take them, and their security."""

from __future__ import annotations

from typing import Any

from pagemill_operator.backends.kubernetes.render.container import GPU
from pagemill_operator.backends.kubernetes.render.security import pod_security
from pagemill_operator.backends.kubernetes.snapshot import OWNER_LABEL, RenderContext
from pagemill_operator.plan.types import Plan, Process

GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
SPREAD_OVER = ("kubernetes.io/hostname", "topology.kubernetes.io/zone")


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
    cache = plan.cache
    if cache is None or cache.size is None or cache.access_mode != "ReadWriteOnce":
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


def pull_secrets(plan: Plan, context: RenderContext) -> dict[str, Any]:
    """With a model that the kubelet pulls, its credentials are the kubelet's."""
    if plan.cache is None or not plan.cache.image_volume or plan.credentials is None:
        return {}
    names = [*context.image_pull_secrets, plan.credentials.name]
    return {"imagePullSecrets": [{"name": name} for name in dict.fromkeys(names)]}
