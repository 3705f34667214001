"""Renders the volume of a cached model and its loader: a Job for a claim, an init container for a node's folder.

Credentials appear in the loader only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pagemill_models.sources import find_kind
from pagemill_models.sources.base import Credential
from pagemill_operator.backends.kubernetes.render.config import TERMINATION_LOG
from pagemill_operator.backends.kubernetes.render.container import engine_image, environment
from pagemill_operator.backends.kubernetes.render.model import (
    keeps_kernels,
    kernels_folder,
    loaded_sources,
    model_claim,
    model_volume,
    source_folder,
)
from pagemill_operator.backends.kubernetes.render.names import LOADER, child, claim_name, digest, labels
from pagemill_operator.backends.kubernetes.render.overrides import engine_override, merge
from pagemill_operator.backends.kubernetes.render.placement import common_spec, loader_placement
from pagemill_operator.backends.kubernetes.render.security import container_security
from pagemill_operator.backends.kubernetes.snapshot import Manifest, Owner, RenderContext
from pagemill_operator.plan.pod_template import MODEL_PATH, OWN_VOLUMES
from pagemill_operator.plan.types import ModelCachePlan, Plan, SecretKey

MODULE = "pagemill_engine.fetching"
REPORTED_FAILURE = {"name": "PAGEMILL_REPORTED_FAILURE", "value": "/tmp/reported-failure"}
"""Where a loader keeps the reason that it has reported, so that it tries again within its next run."""
RETRIES = 100_000
"""The Job's backoff limit. The kubelet restarts a failed loader in its pod, so that it recovers once a Secret is fixed.
"""
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
    "securityContext",
    "serviceAccountName",
    "tolerations",
)
"""Pod template overrides that also apply to the loader: where it runs and how it reaches the network."""
BOUND_VOLUMES = ("persistentVolumeClaim", "ephemeral")
"""Kinds of volumes that the loader does not mount: another pod may need them, or each pod gets its own."""


def loader_name(plan: Plan) -> str | None:
    """Return the name of the loader Job, or None without a cache.

    Another source, revision, set of credentials or environment gives another Job.
    """
    if not plan.waits_for_job:
        return None
    process = plan.groups[0].process
    credentials = plan.credentials and (plan.credentials.name, plan.credentials.key)
    parts = [plan.source, credentials, model_claim(plan), process.environment, process.environment_from]
    if keeps_kernels(plan):
        parts.append(kernels_folder())
    parts += loaded_sources(plan)[1:]
    return f"{plan.name}-load-{digest(parts, 8)}"


def render_claim(plan: Plan, owner: Owner, cache: ModelCachePlan) -> Manifest:
    spec: dict[str, Any] = {
        "accessModes": [cache.access_mode],
        "resources": {"requests": {"storage": str(cache.size)}},
    }
    if cache.storage_class_name:
        spec["storageClassName"] = cache.storage_class_name
    return child("v1", "PersistentVolumeClaim", claim_name(plan.name), owner, LOADER, spec=spec)


def render_loader(plan: Plan, owner: Owner, context: RenderContext) -> Manifest:
    """Render the Job. Its template is immutable; an input that would change it changes its name."""
    template = {
        "metadata": {"labels": labels(plan.name, LOADER), "annotations": {}},
        "spec": {
            **common_spec(context),
            **loader_placement(plan),
            "restartPolicy": "OnFailure",
            "containers": [loader_container(plan, context)],
            "volumes": [model_volume(plan, writable=True), {"name": "tmp", "emptyDir": {}}],
        },
    }
    spec = {"backoffLimit": RETRIES, "template": merge(template, _overrides(plan.groups[0].template))}
    return child("batch/v1", "Job", str(loader_name(plan)), owner, LOADER, spec=spec)


def loader_container(plan: Plan, context: RenderContext) -> dict[str, Any]:
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
        "volumeMounts": [
            {"name": "model", "mountPath": MODEL_PATH},
            {"name": "tmp", "mountPath": "/tmp"},
            *_own_mounts(group.template),
        ],
    }


def _arguments(plan: Plan) -> list[str]:
    arguments = []
    for source in loaded_sources(plan):
        arguments += ["--source", source, "--target", source_folder(source)]
    cache = plan.cache
    if cache is not None and cache.claim_name is None:
        arguments.append("--evict")  # everything else there is fetched again when it is needed
    if cache is not None and cache.size_limit_bytes is not None:
        arguments += ["--size-limit-bytes", str(cache.size_limit_bytes)]
    return [*arguments, "--kernels", kernels_folder()] if keeps_kernels(plan) else arguments


def _environment(plan: Plan) -> list[dict[str, Any]]:
    """Return the engine's variables (a mirror, a proxy, a private authority), overridden by the credentials."""
    group = plan.groups[0]
    variables: list[dict[str, Any]] = merge(
        environment(group.process), engine_override(group.template).get("env") or [], "env"
    )
    variables = [*variables, REPORTED_FAILURE]
    if plan.credentials is None:
        return variables
    wanted = {each.variable: each for source in loaded_sources(plan) for each in find_kind(source).credentials}
    given = [_from_secret(credential, plan.credentials) for credential in wanted.values()]
    names = {variable["name"] for variable in given}
    return [*(variable for variable in variables if variable["name"] not in names), *given]


def _from_secret(credential: Credential, secret: SecretKey) -> dict[str, Any]:
    reference: dict[str, Any] = {"name": secret.name, "key": credential.key or secret.key}
    if credential.is_optional:
        reference["optional"] = True
    return {"name": credential.variable, "valueFrom": {"secretKeyRef": reference}}


def _overrides(template: dict[str, Any]) -> dict[str, Any]:
    pod = template.get("spec") or {}
    spec = {name: pod[name] for name in PLACEMENT_OVERRIDES if name in pod}
    # A claim of a name binds its pods to one node; one from a template would reserve another device for the loader.
    shared = [each for each in pod.get("resourceClaims") or [] if "resourceClaimName" in each]
    spec |= {"resourceClaims": shared} if shared else {}
    mounted = {mount["name"] for mount in _own_mounts(template)}
    spec["volumes"] = [volume for volume in pod.get("volumes") or [] if volume.get("name") in mounted]
    return {"metadata": template.get("metadata") or {}, "spec": spec}


def _own_mounts(template: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the mounts that the resource adds to its engine, such as a private authority's, of volumes that any number
    of pods may have."""
    volumes = (template.get("spec") or {}).get("volumes") or []
    shared = {volume.get("name") for volume in volumes if not any(volume.get(kind) for kind in BOUND_VOLUMES)}
    for mount in engine_override(template).get("volumeMounts") or []:
        if mount.get("name") in shared - OWN_VOLUMES.keys():
            yield mount
