"""Decides to which `LLMDeployment` an object belongs: this one, an earlier one of the same name, or none. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from pagemill_operator.backends.kubernetes.snapshot import COMPONENT_LABEL, FIELD_MANAGER, MANAGED_BY_LABEL, Manifest

CLOCK_SKEW_S = 5.0
"""Seconds by which the clocks of API servers may differ; each stamps the objects that it creates."""
MAKERS = frozenset({"Deployment", "LeaderWorkerSet", "Job"})
"""Kinds of children that make pods."""
Children = Mapping[tuple[str, str], Manifest]


def is_own(child: Manifest, owner: Manifest) -> bool:
    """Whether the operator made the child for this owner, or made it and it has no owner; the latter is adopted."""
    controller = controller_of(child)
    return _is_managed(child) and (controller is None or controller["uid"] == owner["metadata"]["uid"])


def own_children(children: Children, owner: Manifest) -> dict[tuple[str, str], Manifest]:
    return {at: child for at, child in children.items() if is_own(child, owner)}


def namesake_children(children: Children, owner: Manifest) -> dict[tuple[str, str], Manifest]:
    """Return the children of an earlier deployment of the same name that the cluster has not deleted yet."""
    return {at: child for at, child in children.items() if _is_of_namesake(child, owner)}


def own_pods(pods: Iterable[Manifest], owner: Manifest, children: Children) -> tuple[Manifest, ...]:
    """Return the pods that are not older than the owner or one of its own `children`.

    Older ones belong to an earlier deployment of its name, whose children may have been adopted with their pods.
    """
    created = owner["metadata"].get("creationTimestamp")
    if created is None:
        return tuple(pods)
    makers = [child for (kind, _), child in children.items() if kind in MAKERS]
    times = [created, *(maker["metadata"].get("creationTimestamp", created) for maker in makers)]
    since = min(map(datetime.fromisoformat, times)) - timedelta(seconds=CLOCK_SKEW_S)
    return tuple(
        pod for pod in pods if datetime.fromisoformat(pod["metadata"].get("creationTimestamp", created)) >= since
    )


def controls(maker: Manifest, pod: Manifest) -> bool:
    """Whether the object, such as a Job, made the pod itself. Names of pods are cut, so they tell nothing."""
    controller = controller_of(pod)
    return controller is not None and controller["uid"] == maker["metadata"]["uid"]


def is_ending(manifest: Manifest) -> bool:
    return bool(manifest["metadata"].get("deletionTimestamp"))


def is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any((condition["type"], condition["status"]) == ("Ready", "True") for condition in conditions)


def component_of(pod: Manifest) -> str:
    return str((pod["metadata"].get("labels") or {}).get(COMPONENT_LABEL, ""))


def _is_of_namesake(child: Manifest, owner: Manifest) -> bool:
    controller = controller_of(child)
    if controller is None or not _is_managed(child):
        return False
    return bool(controller.get("kind") == "LLMDeployment" and controller["uid"] != owner["metadata"]["uid"])


def _is_managed(child: Manifest) -> bool:
    return bool((child["metadata"].get("labels") or {}).get(MANAGED_BY_LABEL) == FIELD_MANAGER)


def controller_of(child: Manifest) -> dict[str, Any] | None:
    references = child["metadata"].get("ownerReferences") or []
    return next((reference for reference in references if reference.get("controller")), None)
