"""Renders all children of one `LLMDeployment` in the order in which they are applied, and the engine Deployment."""

from __future__ import annotations

from collections.abc import Iterator

from pagemill_operator.backends.kubernetes.kinds import LEADER_WORKER_SET
from pagemill_operator.backends.kubernetes.render.config import render_adapters, render_config, render_tokens
from pagemill_operator.backends.kubernetes.render.loader import render_claim, render_loader
from pagemill_operator.backends.kubernetes.render.names import (
    AWAKE_ANNOTATION,
    GENERATION_ANNOTATION,
    IN_PLACE_ANNOTATION,
    awake_note,
    child,
    engine_name,
    group_name,
    group_pods,
    selector,
)
from pagemill_operator.backends.kubernetes.render.network import (
    render_network_policy,
    render_pod_monitor,
    render_service,
)
from pagemill_operator.backends.kubernetes.render.pod import engine_template, is_of_group, worker_template
from pagemill_operator.backends.kubernetes.snapshot import Manifest, Owner, RenderContext
from pagemill_operator.plan.types import Group, Plan

PROGRESS_DEADLINE_S = 3 * 3600
"""Seconds that a rollout may take: loading a large model may take hours. A start that fails is reported earlier."""
MIN_READY_S = 5
"""Seconds that a new pod is ready before an old one drains, so that gateways know it by then."""
REVISION_HISTORY = 2


def render_children(plan: Plan, owner: Owner, context: RenderContext) -> list[Manifest]:
    """Return every wanted child; the engine Deployment comes last, once its model is loaded."""
    return list(_children(plan, owner, context))


def _children(plan: Plan, owner: Owner, context: RenderContext) -> Iterator[Manifest]:
    # The network policy comes first, so that no pod is ever reachable without it.
    yield render_network_policy(plan, owner, context)
    yield render_service(plan, owner)
    yield render_tokens(owner, context.tokens, plan.names)
    if plan.cache is not None and plan.waits_for_job:
        if plan.cache.claim_name is None:
            yield render_claim(plan, owner, plan.cache)
        yield render_loader(plan, owner, context)
    if plan.replicas > 1:
        yield render_disruption_budget(plan, owner)
    if context.has_pod_monitors:
        yield render_pod_monitor(plan, owner, context)
    if not plan.waits_for_job or context.loader_done:
        yield render_config(plan, owner, context)
        if plan.serves_adapters:
            yield render_adapters(plan, owner)
        is_group = plan.pods_per_replica > 1
        yield render_groups(plan, owner, context) if is_group else render_deployment(plan, owner, context)


def render_deployment(plan: Plan, owner: Owner, context: RenderContext) -> Manifest:
    group = plan.groups[0]
    spec = {
        "replicas": plan.all_replicas,
        "selector": {"matchLabels": selector(plan.name)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": _rolling_update(group, context)},
        "minReadySeconds": MIN_READY_S,
        "progressDeadlineSeconds": PROGRESS_DEADLINE_S,
        "revisionHistoryLimit": REVISION_HISTORY,
        "template": engine_template(plan, context),
    }
    return _annotated(child("apps/v1", "Deployment", engine_name(plan.name), owner, spec=spec), plan, context)


def render_groups(plan: Plan, owner: Owner, context: RenderContext) -> Manifest:
    """Render the LeaderWorkerSet, which makes each replica as a group of pods and restarts it as a whole.

    At least one group may be missing during a rollout: its controller adds no group to a single one, and
    StatefulSets refuse 0.
    """
    rolling = _rolling_update(plan.groups[0], context)
    leader = engine_template(plan, context)
    spec = {
        "replicas": plan.all_replicas,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {
                "maxSurge": rolling["maxSurge"],
                "maxUnavailable": max(1, plan.groups[0].unavailable),
                "partition": 0,
            },
        },
        "networkConfig": {"subdomainPolicy": "Shared"},
        "leaderWorkerTemplate": {
            "size": plan.pods_per_replica,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": leader,
            "workerTemplate": worker_template(plan, context, leader),
        },
    }
    groups = child(LEADER_WORKER_SET.api_version, LEADER_WORKER_SET.name, group_name(plan.name), owner, spec=spec)
    given = plan.groups[0].template.get("metadata") or {}
    for each in ("labels", "annotations"):
        names = groups["metadata"].setdefault(each, {})
        names |= {name: value for name, value in (given.get(each) or {}).items() if is_of_group(name)}
    return _annotated(groups, plan, context)


def _annotated(workload: Manifest, plan: Plan, context: RenderContext) -> Manifest:
    """Add the notes by which pods are compared with the plan."""
    notes = {GENERATION_ANNOTATION: str(plan.generation), AWAKE_ANNOTATION: awake_note(plan)}
    notes[IN_PLACE_ANNOTATION] = context.in_place or None
    metadata = workload["metadata"]
    metadata["annotations"] = metadata.get("annotations", {}) | {
        name: note for name, note in notes.items() if note is not None
    }
    return workload


def _rolling_update(group: Group, context: RenderContext) -> dict[str, int | str]:
    if context.in_place:
        return {"maxSurge": 0, "maxUnavailable": max(1, group.unavailable)}
    return {"maxSurge": group.max_surge, "maxUnavailable": group.max_unavailable}


def render_disruption_budget(plan: Plan, owner: Owner) -> Manifest:
    """Allow one disruption at a time, beside sleeping pods, which are never ready.

    Pods that are not ready may always be evicted; otherwise a broken pod would block a node's drain.
    """
    # With one pod of a group all are missing, so that no second group is disrupted.
    is_group = plan.pods_per_replica > 1
    spec = {
        "maxUnavailable": 1 + plan.standby,
        "selector": group_pods(plan.name) if is_group else {"matchLabels": selector(plan.name)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return child("policy/v1", "PodDisruptionBudget", engine_name(plan.name), owner, spec=spec)
