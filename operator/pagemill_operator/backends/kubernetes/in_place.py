"""Decides whether a rollout replaces replicas in place, because no node has room for one more. Pure functions.

With `spec.rollout.strategy: Auto` a replica is added before one is removed. Where the added one finds no node, the
rollout replaces in place if requests survive that: another replica is ready, or they wait for the start. The decision
is a note on the Deployment, which lasts until the rollout has ended. `render` reads it from its context, `observe`
shows what it means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import NamedTuple

from pagemill_operator.backends.kubernetes.ownership import Children, component_of, is_ready
from pagemill_operator.backends.kubernetes.render.names import (
    ENGINE,
    IN_PLACE_ANNOTATION,
    pod_template,
    template_of,
    workload_at,
)
from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.plan.types import Plan

STUCK_S = 60.0
"""Seconds for which an added replica must have found no node."""


class Rollout(NamedTuple):
    in_place: str = ""
    """Why replicas are replaced in place; empty if they are not."""
    remedy: str = ""
    """What follows from a replica that finds no node, or what to do; empty if no older replica runs."""
    wait_s: float | None = None
    """Seconds until the time alone changes this."""


def rollout_of(plan: Plan, owner: Manifest, children: Children, pods: Iterable[Manifest], now: datetime) -> Rollout:
    """Return how the deployment's rollout goes on."""
    deployment = children.get(workload_at(plan))
    if deployment is None or not plan.groups[0].surge:
        return Rollout()
    current = template_of(pod_template(deployment))
    live = [pod for pod in pods if _is_live(pod)]
    older = [pod for pod in live if template_of(pod) != current]
    if not older:
        return Rollout()
    if plan.groups[0].strategy == "Auto" and (why := _note(deployment, IN_PLACE_ANNOTATION)):
        return _in_place(why)
    why = _survives(plan, owner, live)
    stuck_s = [
        (now - since).total_seconds()
        for pod in live
        if template_of(pod) == current
        for since in _unschedulable_since(pod)
    ]
    if plan.groups[0].strategy != "Auto" or not why:
        return Rollout(remedy=_BOTH_WAYS)
    if not stuck_s:
        return Rollout(remedy=_IN_PLACE_LATER)
    if max(stuck_s) < STUCK_S:
        return Rollout(remedy=_IN_PLACE_LATER, wait_s=STUCK_S - max(stuck_s))
    return _in_place(f"no node has room for another replica, and {why}")


def _in_place(why: str) -> Rollout:
    return Rollout(why, f"replicas are replaced in place: {why}")


_IN_PLACE_LATER = f"if that lasts for {STUCK_S:.0f} s, replicas are replaced in place (spec.rollout.strategy Auto)"
_BOTH_WAYS = (
    "spec.rollout adds a replica before one is removed: make room for it, or set spec.rollout.strategy to Replace, "
    "with which requests wait for the new replica or fail"
)


def _survives(plan: Plan, owner: Manifest, live: list[Manifest]) -> str:
    """Return why requests survive if one ready replica is removed first; empty if they may not."""
    if sum(is_ready(pod) for pod in live) > 1:
        return "another replica serves meanwhile"
    start_ms = (owner.get("status") or {}).get("lastStart", {}).get("totalMs")
    queue = plan.served.queue
    if start_ms is not None and queue is not None and start_ms < 1000 * queue.timeout_s:
        return "requests wait for a start, which takes less than spec.routing.queue.timeout"
    return ""


def _unschedulable_since(pod: Manifest) -> Iterator[datetime]:
    for condition in pod.get("status", {}).get("conditions") or []:
        if (condition["type"], condition["status"], condition.get("reason")) == _UNSCHEDULABLE:
            since = condition.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
            if since is not None:
                yield datetime.fromisoformat(since)


_UNSCHEDULABLE = ("PodScheduled", "False", "Unschedulable")


def _is_live(pod: Manifest) -> bool:
    metadata, phase = pod["metadata"], pod.get("status", {}).get("phase")
    return (
        component_of(pod) == ENGINE and not metadata.get("deletionTimestamp") and phase not in ("Failed", "Succeeded")
    )


def _note(manifest: Manifest, name: str) -> str:
    return str((manifest.get("metadata", {}).get("annotations") or {}).get(name, ""))
