"""The volume of a cached model and the Job that fills it. Only here do credentials appear."""

from __future__ import annotations

from typing import Any

from pagemill_operator.backends.kubernetes.render.config import TERMINATION_LOG
from pagemill_operator.backends.kubernetes.render.container import engine_image, environment
from pagemill_operator.backends.kubernetes.render.model import keeps_kernels, kernels_folder, model_claim, model_folder
from pagemill_operator.backends.kubernetes.render.names import LOADER, child, claim_name, digest, labels
from pagemill_operator.backends.kubernetes.render.overrides import merge
from pagemill_operator.backends.kubernetes.render.pod import common_spec, placement, same_node
from pagemill_operator.backends.kubernetes.render.security import container_security
from pagemill_operator.backends.kubernetes.snapshot import Manifest, Owner, RenderContext
from pagemill_operator.plan.pod_template import MODEL_PATH
from pagemill_operator.plan.types import ModelCache, Plan

MODULE = "pagemill_engine.loader"
TOKEN_VARIABLE = "HF_TOKEN"
RETRIES = 100_000
"""The kubelet restarts a failed loader in its pod, at most every five minutes: a corrected Secret heals by itself."""
RESOURCES = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "2", "memory": "2Gi"}}
PLACEMENT_OVERRIDES = (
    "affinity",
    "dnsConfig",
    "dnsPolicy",
    "hostAliases",
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "serviceAccountName",
    "tolerations",
)
"""Overrides of the pod template that hold for the loader as well: where it runs and how it gets there."""


def loader_name(plan: Plan) -> str | None:
    """Name of the Job; another source, revision, credentials or environment is another Job. None without a cache."""
    if plan.cache is None:
        return None
    process = plan.groups[0].process
    credentials = plan.credentials and (plan.credentials.name, plan.credentials.key)
    parts = [plan.source, credentials, model_claim(plan), process.environment, process.environment_from]
    if keeps_kernels(plan):
        parts.append(kernels_folder())
    return f"{plan.name}-load-{digest(parts, 8)}"


def render_claim(plan: Plan, owner: Owner, cache: ModelCache) -> Manifest:
    spec: dict[str, Any] = {
        "accessModes": [cache.access_mode],
        "resources": {"requests": {"storage": str(cache.size)}},
    }
    if cache.storage_class_name:
        spec["storageClassName"] = cache.storage_class_name
    return child("v1", "PersistentVolumeClaim", claim_name(plan.name), owner, LOADER, spec=spec)


def render_loader(plan: Plan, owner: Owner, context: RenderContext) -> Manifest:
    """The Job. Its template cannot change once it exists; what would change it changes its name."""
    template = {
        "metadata": {"labels": labels(plan.name, LOADER), "annotations": {}},
        "spec": {
            **common_spec(context),
            **placement(plan.groups[0].process),
            **same_node(plan),
            "restartPolicy": "OnFailure",
            "containers": [_container(plan, context)],
            "volumes": [
                {"name": "model", "persistentVolumeClaim": {"claimName": model_claim(plan)}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }
    spec = {"backoffLimit": RETRIES, "template": merge(template, _overrides(plan.groups[0].template))}
    return child("batch/v1", "Job", str(loader_name(plan)), owner, LOADER, spec=spec)


def _container(plan: Plan, context: RenderContext) -> dict[str, Any]:
    group = plan.groups[0]
    return {
        "name": LOADER,
        "image": engine_image(group, context),
        "imagePullPolicy": context.image_pull_policy,
        "command": ["python", "-m", MODULE],
        "args": _arguments(plan),
        "env": _environment(plan),
        "resources": RESOURCES,
        "securityContext": container_security(),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "volumeMounts": [{"name": "model", "mountPath": MODEL_PATH}, {"name": "tmp", "mountPath": "/tmp"}],
    }


def _arguments(plan: Plan) -> list[str]:
    arguments = ["--source", plan.source, "--target", model_folder(plan)]
    return [*arguments, "--kernels", kernels_folder()] if keeps_kernels(plan) else arguments


def _environment(plan: Plan) -> list[dict[str, Any]]:
    """The engine's variables (a mirror, a proxy), and the credentials over them."""
    variables = environment(plan.groups[0].process)
    if plan.credentials is None:
        return variables
    reference = {"name": plan.credentials.name, "key": plan.credentials.key}
    variables = [variable for variable in variables if variable["name"] != TOKEN_VARIABLE]
    return [*variables, {"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": reference}}]


def _overrides(template: dict[str, Any]) -> dict[str, Any]:
    pod = template.get("spec") or {}
    spec = {name: pod[name] for name in PLACEMENT_OVERRIDES if name in pod}
    return {"metadata": template.get("metadata") or {}, "spec": spec}
