"""Merges overrides into a manifest like a strategic merge patch, as far as pod templates need it.

Objects merge field by field; lists whose items have a key merge item by item; tolerations and required affinities
between pods are appended; any other value is replaced. A null changes nothing: no override can remove what the
operator wrote, except the ids of users and groups, which some platforms assign by themselves (OpenShift's ranges).
"""

from __future__ import annotations

import copy
from typing import Any

from pagemill_operator.plan.pod_template import CONTAINER

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""List -> the field by which Kubernetes identifies its items."""
ASSIGNED = ("runAsUser", "runAsGroup", "fsGroup")
"""Fields of a security context that a null removes: the platform's admission fills them then."""
APPENDED = ("tolerations", "requiredDuringSchedulingIgnoredDuringExecution")
"""Lists to which an override appends. The only affinities that are lists are those between pods; all terms must hold.
"""


def merge(base: Any, override: Any, field: str = "") -> Any:
    """Return `base` with `override` merged over it; neither is changed."""
    if override is None:
        return copy.deepcopy(base)
    if isinstance(base, dict) and isinstance(override, dict):
        return _merge_objects(base, override)
    if isinstance(base, list) and isinstance(override, list):
        return _merge_lists(base, override, field)
    return _without_nulls(override)


def engine_override(template: dict[str, Any]) -> dict[str, Any]:
    """Return what a pod template overrides of the engine's container; empty for nothing."""
    containers = (template.get("spec") or {}).get("containers") or []
    return next((each for each in containers if each.get("name") == CONTAINER), {})


def _merge_objects(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(base)
    for name, value in override.items():
        if value is not None:
            merged[name] = merge(base.get(name), value, name)
        elif name in ASSIGNED:
            merged.pop(name, None)
    return merged


def _merge_lists(base: list[Any], override: list[Any], field: str) -> list[Any]:
    if field in APPENDED:
        return [*copy.deepcopy(base), *(_without_nulls(item) for item in override if item not in base)]
    key = MERGE_KEYS.get(field)
    if key is None or not all(isinstance(item, dict) for item in (*base, *override)):
        return [_without_nulls(item) for item in override]
    merged = copy.deepcopy(base)
    positions = {item.get(key): index for index, item in enumerate(base)}
    for item in override:
        index = positions.get(item.get(key)) if isinstance(item.get(key), str | int) else None
        if index is None:
            merged.append(_without_nulls(item))
        else:
            merged[index] = merge(merged[index], item)
    return merged


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
