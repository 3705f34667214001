"""Compares rendered children with live ones and decides what to write. Pure functions.

A child is applied if its digest differs or if another writer changed a rendered field. Fields that the API server or
other writers add are left alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from pagemill_operator.backends.kubernetes.ownership import component_of
from pagemill_operator.backends.kubernetes.render.names import ENGINE, pod_template, template_of
from pagemill_operator.backends.kubernetes.slim import slim
from pagemill_operator.backends.kubernetes.snapshot import DIGEST_ANNOTATION, Manifest

Children = Mapping[tuple[str, str], Manifest]
REMOVABLE = frozenset({"Job", "PersistentVolumeClaim", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor"})
"""Kinds whose unwanted objects are deleted at once. A Deployment, Service or Secret is deleted only with its owner."""
WORKLOADS = ("Deployment", "LeaderWorkerSet")
_LIST_KEYS = ("name", "mountPath", "containerPort", "port", "key")
"""Fields that identify an item of a list to which other writers may add items."""
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?)(?:(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)|[eE]([+-]?[0-9]{1,2}))?")
_FACTORS = {None: Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3")}
_FACTORS |= {suffix: Decimal(10 ** (3 * power)) for power, suffix in enumerate("kMGTPE", 1)}
_FACTORS |= {f"{suffix}i": Decimal(2 ** (10 * power)) for power, suffix in enumerate("KMGTPE", 1)}


def with_digest(manifest: Manifest) -> Manifest:
    """Return the manifest with its digest in an annotation."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), DIGEST_ANNOTATION: manifest_digest(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def manifest_digest(manifest: Manifest) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Answers:
    """The API server's answers to applies where they differ from the manifest (a webhook, a default).

    Such an answer is accepted: applying again would bring the same answer every time.
    """

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], tuple[str, str]] = {}
        """(kind, name) -> the manifest's digest and the digest of the answer."""

    def note(self, manifest: Manifest, answer: Manifest) -> None:
        """Record the answer to an apply; `answer` is the object as the cache keeps it."""
        at = (manifest["kind"], manifest["metadata"]["name"])
        self._answers.pop(at, None)
        if differs(manifest, answer):
            self._answers[at] = _requested(manifest), _content_digest(answer)

    def accepts(self, manifest: Manifest, live: Manifest) -> bool:
        known = self._answers.get((manifest["kind"], manifest["metadata"]["name"]))
        return known is not None and known == (_requested(manifest), _content_digest(live))


def _requested(manifest: Manifest) -> str:
    """Return the manifest's digest annotation; its resourceVersion is not part of it."""
    return str(manifest["metadata"].get("annotations", {}).get(DIGEST_ANNOTATION, ""))


def _content_digest(live: Manifest) -> str:
    """Return the digest of an object's content, without its status and the fields that the API server counts."""
    content = {name: value for name, value in live.items() if name not in ("metadata", "status")}
    metadata = {name: live["metadata"].get(name) for name in ("labels", "annotations", "ownerReferences")}
    return manifest_digest({**content, "metadata": metadata})


def to_apply(wanted: Iterable[Manifest], live: Children, answers: Answers) -> Iterator[Manifest]:
    """Yield those of `wanted` (with digests) that differ from the live objects; see `_guarded` for replica counts."""
    for manifest in wanted:
        found = live.get((manifest["kind"], manifest["metadata"]["name"]))
        if found is None:
            yield manifest
        elif manifest["kind"] != "Job" and differs(manifest, found) and not answers.accepts(manifest, found):
            # A Job's template is immutable; the Job's name changes with its content.
            yield _guarded(manifest, found)


def differs(manifest: Manifest, live: Manifest) -> bool:
    """Whether the cached object `live` differs from the manifest."""
    digest = live["metadata"].get("annotations", {}).get(DIGEST_ANNOTATION)
    if digest != manifest["metadata"].get("annotations", {}).get(DIGEST_ANNOTATION):
        return True
    slimmed = slim(manifest["kind"], manifest)
    return not contains(live, slimmed)


def to_delete(wanted: Iterable[Manifest], live: Children, used_config_maps: frozenset[str]) -> Iterator[Manifest]:
    """Yield own children that are not wanted any more and that no pod needs."""
    names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in wanted}
    for (kind, name), child in live.items():
        if (kind, name) in names or child["metadata"].get("deletionTimestamp"):
            continue
        if kind in REMOVABLE or (kind == "ConfigMap" and name not in used_config_maps):
            yield child


def used_config_maps(pods: Iterable[Manifest], workloads: Iterable[Manifest]) -> frozenset[str]:
    """Return the names of ConfigMaps that pods mount, or that an unfinished rollout may still start pods with."""
    templates = [pod_template(workload) for workload in workloads]
    names = {
        volume["configMap"]["name"]
        for pod in [*pods, *templates]
        for volume in pod["spec"].get("volumes", [])
        if "configMap" in volume
    }
    return frozenset(names)


def rolled_out(workload: Manifest, pods: Iterable[Manifest]) -> bool:
    """Whether every pod has the newest template, so that older ReplicaSets and groups start no more pods."""
    status, wanted = workload.get("status", {}), workload["spec"].get("replicas", 1)
    if workload["kind"] == "LeaderWorkerSet":  # its status does not say which generation it is of
        newest = template_of(pod_template(workload))
        if any(template_of(pod) != newest for pod in pods if component_of(pod) == ENGINE):
            return False
    elif status.get("observedGeneration", 0) < workload["metadata"].get("generation", 0):
        return False
    return bool(status.get("updatedReplicas", 0) == status.get("replicas", 0) == wanted)


def contains(live: Any, wanted: Any) -> bool:
    """Whether `live` contains everything in `wanted`, however the API server spells it."""
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(_has(live, key, value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(live, list) and _contains_items(live, wanted)
    return bool(live == wanted) or _same_quantity(live, wanted)


def _has(live: dict[str, Any], key: str, value: Any) -> bool:
    # The API server drops empty fields.
    return contains(live[key], value) if key in live else value in (None, "", 0, False, [], {})


def _contains_items(live: list[Any], wanted: list[Any]) -> bool:
    key = _list_key(wanted)
    if key is None:
        return len(live) == len(wanted) and all(contains(a, b) for a, b in zip(live, wanted, strict=True))
    found = {item[key]: item for item in live if isinstance(item, dict) and key in item}
    return all(item[key] in found and contains(found[item[key]], item) for item in wanted)


def _list_key(items: list[Any]) -> str | None:
    """Return the field whose values identify the items of a list, or None."""
    for key in _LIST_KEYS:
        if all(isinstance(item, dict) and isinstance(item.get(key), str | int) for item in items):
            values = [item[key] for item in items]
            return key if values and len(set(values)) == len(values) else None
    return None


def _same_quantity(live: Any, wanted: Any) -> bool:
    """Whether two quantities are equal: `1024Mi` is `1Gi` and `0.5` is `500m`."""
    if not isinstance(live, str | int) or not isinstance(wanted, str | int | float):
        return False
    return _amount(live) == _amount(wanted) is not None


def _amount(value: str | int | float) -> Decimal | None:
    match = _QUANTITY.fullmatch(str(value))
    return Decimal(match[1]).scaleb(int(match[3] or 0)) * _FACTORS[match[2]] if match else None


def _guarded(manifest: Manifest, live: Manifest) -> Manifest:
    """Add the resourceVersion if the replicas change: the count applies only to the version that it was decided on."""
    if manifest["kind"] not in WORKLOADS or manifest["spec"].get("replicas") == live["spec"].get("replicas"):
        return manifest
    metadata = {**manifest["metadata"], "resourceVersion": live["metadata"]["resourceVersion"]}
    return {**manifest, "metadata": metadata}
