"""Decides to which `LLMDeployment` an object belongs: this one, an earlier one of the same name, or none. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from pagemill_operator.backends.kubernetes.snapshot import FIELD_MANAGER, MANAGED_BY_LABEL, Manifest

CLOCK_SKEW_S = 5.0
"""Seconds by which the clocks of API servers may differ; each stamps the objects that it creates."""
Children = Mapping[tuple[str, str], Manifest]


def is_own(child: Manifest, owner: Manifest) -> bool:
    """Whether the operator made the child for this owner, or made it and it has no owner; the latter is adopted."""
    controller = _controller(child)
    return _is_managed(child) and (controller is None or controller["uid"] == owner["metadata"]["uid"])


def own_children(children: Children, owner: Manifest) -> dict[tuple[str, str], Manifest]:
    return {at: child for at, child in children.items() if is_own(child, owner)}


def namesake_children(children: Children, owner: Manifest) -> dict[tuple[str, str], Manifest]:
    """Return the children of an earlier deployment of the same name that the cluster has not deleted yet."""
    return {at: child for at, child in children.items() if _is_of_namesake(child, owner)}


def own_pods(pods: Iterable[Manifest], owner: Manifest) -> tuple[Manifest, ...]:
    """Return the pods that are not older than the owner; older ones belong to an earlier deployment of its name."""
    created = owner["metadata"].get("creationTimestamp")
    if created is None:
        return tuple(pods)
    since = datetime.fromisoformat(created) - timedelta(seconds=CLOCK_SKEW_S)
    return tuple(
        pod for pod in pods if datetime.fromisoformat(pod["metadata"].get("creationTimestamp", created)) >= since
    )


def is_ending(manifest: Manifest) -> bool:
    return bool(manifest["metadata"].get("deletionTimestamp"))


def _is_of_namesake(child: Manifest, owner: Manifest) -> bool:
    controller = _controller(child)
    if controller is None or not _is_managed(child):
        return False
    return bool(controller.get("kind") == "LLMDeployment" and controller["uid"] != owner["metadata"]["uid"])


def _is_managed(child: Manifest) -> bool:
    return bool((child["metadata"].get("labels") or {}).get(MANAGED_BY_LABEL) == FIELD_MANAGER)


def _controller(child: Manifest) -> dict[str, Any] | None:
    references = child["metadata"].get("ownerReferences") or []
    return next((reference for reference in references if reference.get("controller")), None)
