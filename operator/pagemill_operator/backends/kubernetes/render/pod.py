"""Renders the engine's pod template: container, volumes, placement, and the resource's overrides on top."""

from __future__ import annotations

import math
from typing import Any

from pagemill_operator.backends.kubernetes.render.config import settings_text
from pagemill_operator.backends.kubernetes.render.container import engine_container
from pagemill_operator.backends.kubernetes.render.loader import loader_container
from pagemill_operator.backends.kubernetes.render.model import model_volume
from pagemill_operator.backends.kubernetes.render.names import (
    ENGINE,
    TEMPLATE_ANNOTATION,
    WORKER,
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
from pagemill_operator.backends.kubernetes.snapshot import OWNER_LABEL, Manifest, RenderContext
from pagemill_operator.plan.pod_template import GRACE_MARGIN_S
from pagemill_operator.plan.types import Plan

GROUP_KEY = "leaderworkerset.sigs.k8s.io/group-key"
GROUP_REVISION = "leaderworkerset.sigs.k8s.io/template-revision-hash"
OF_GROUPS = ("leaderworkerset.sigs.k8s.io/", "kueue.x-k8s.io/", "scheduling.volcano.sh/")
"""Prefixes of the labels and annotations of schedulers that place whole groups."""


def engine_template(plan: Plan, context: RenderContext) -> Manifest:
    """Return the template with its own digest as an annotation."""
    template = _template(plan, ENGINE, _pod_spec(plan, context))
    template["metadata"]["annotations"] |= {TEMPLATE_ANNOTATION: digest(template, 16)}
    return template


def worker_template(plan: Plan, context: RenderContext, leader: Manifest) -> Manifest:
    """Return the template of the pods that compute with those of `leader`, whose digest they have, too."""
    spec = _pod_spec(plan, context) | {"containers": [engine_container(plan, context, serves=False)]}
    # The first pod may take all of its own time to end.
    spec["terminationGracePeriodSeconds"] += GRACE_MARGIN_S
    del spec["topologySpreadConstraints"]
    own_group = {"labelSelector": {"matchLabels": {OWNER_LABEL: plan.name}}, "matchLabelKeys": [GROUP_KEY]}
    near = [{"weight": 100, "podAffinityTerm": {**own_group, "topologyKey": key}} for key in SPREAD_OVER[1:]]
    affinity = spec.get("affinity", {}).get("podAffinity", {})
    spec["affinity"] = {"podAffinity": {**affinity, "preferredDuringSchedulingIgnoredDuringExecution": near}}
    template = _template(plan, WORKER, spec)
    key = TEMPLATE_ANNOTATION
    template["metadata"]["annotations"] |= {key: leader["metadata"]["annotations"][key]}
    return template


def _template(plan: Plan, component: str, spec: dict[str, Any]) -> Manifest:
    own = {"metadata": {"labels": labels(plan.name, component), "annotations": {}}, "spec": spec}
    template: Manifest = merge(own, plan.groups[0].template)
    if plan.pods_per_replica > 1:
        for each in ("labels", "annotations"):
            names = template["metadata"][each]
            template["metadata"][each] = {name: value for name, value in names.items() if not is_of_group(name)}
    return template


def is_of_group(name: str) -> bool:
    """Whether a label or an annotation concerns a whole group: it is set on the LeaderWorkerSet, not on pods."""
    return name.startswith(OF_GROUPS)


def _pod_spec(plan: Plan, context: RenderContext) -> dict[str, Any]:
    process = plan.groups[0].process
    revision = "pod-template-hash" if plan.pods_per_replica == 1 else GROUP_REVISION
    return {
        **common_spec(context),
        **pull_secrets(plan, context),
        **placement(process),
        **same_node(plan),
        **_loaders(plan, context),
        "containers": [engine_container(plan, context)],
        "terminationGracePeriodSeconds": math.ceil(process.drain_timeout_s) + GRACE_MARGIN_S,
        "topologySpreadConstraints": [_spread(plan.name, key, revision) for key in SPREAD_OVER],
        "volumes": _volumes(plan, context),
    }


def _loaders(plan: Plan, context: RenderContext) -> dict[str, Any]:
    """Return the init containers: the first pod on a node fills the node's folder, and the others wait for it."""
    by_pods = plan.cache is not None and plan.cache.host_path is not None
    return {"initContainers": [loader_container(plan, context)]} if by_pods else {}


def _spread(name: str, topology_key: str, revision: str) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": topology_key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(name)},
        "matchLabelKeys": [revision],
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
