"""Reduces objects to the fields that are read, with shared strings, so that all of a cluster's fit in memory.

Contents of Secrets and ConfigMaps become digests: differences remain visible, and no secret stays in memory.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import sys
from typing import Any

from pagemill_operator.backends.kubernetes.kinds import AUTOSCALER
from pagemill_operator.backends.kubernetes.snapshot import Manifest

_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
    "annotations",
    "ownerReferences",
)
_ANNOTATIONS_OF_OTHERS = ("kubectl.kubernetes.io/last-applied-configuration", "deployment.kubernetes.io/revision")
_POD_SPEC = ("nodeName", "nodeSelector", "schedulingGates")
_POD_STATUS = (
    "phase",
    "reason",
    "message",
    "startTime",
    "podIP",
    "conditions",
    "containerStatuses",
    "initContainerStatuses",
)
_VOLUMES = frozenset({"configMap", "persistentVolumeClaim", "image"})
_SHARED_LENGTH = 40
"""Longest string that is shared; longer strings rarely occur in two objects."""


def slim(kind: str, manifest: Manifest) -> Manifest:
    """Return a reduced copy that shares no container with `manifest`."""
    metadata = {name: value for name, value in manifest["metadata"].items() if name in _METADATA}
    if annotations := metadata.get("annotations"):
        metadata["annotations"] = {k: v for k, v in annotations.items() if k not in _ANNOTATIONS_OF_OTHERS}
    parts = {name: value for name, value in manifest.items() if name not in ("metadata", "apiVersion", "kind")}
    if kind == "Pod":
        parts = _pod_parts(manifest)
    if kind == AUTOSCALER.name:
        parts = {"spec": {"scaleTargetRef": manifest["spec"]["scaleTargetRef"]}}
    if kind in ("Secret", "ConfigMap"):
        parts = _content_parts(kind, parts)
    slimmed: Manifest = _shared({"kind": kind, "metadata": metadata, **parts})
    return slimmed


def _pod_parts(pod: Manifest) -> Manifest:
    spec, status = pod.get("spec", {}), pod.get("status", {})
    kept = {name: spec[name] for name in _POD_SPEC if name in spec}
    containers = spec.get("containers", [])
    kept["containers"] = [
        {name: container[name] for name in ("name", "image", "resources", "ports") if name in container}
        for container in containers
    ]
    kept["volumes"] = [volume for volume in spec.get("volumes", []) if not _VOLUMES.isdisjoint(volume)]
    return {"spec": kept, "status": {name: status[name] for name in _POD_STATUS if name in status}}


def _content_parts(kind: str, parts: Manifest) -> Manifest:
    kept = {name: value for name, value in parts.items() if name not in ("data", "stringData", "binaryData")}
    plain = _items(parts, "stringData") + (_items(parts, "data") if kind == "ConfigMap" else [])
    encoded = _items(parts, "binaryData") + (_items(parts, "data") if kind == "Secret" else [])
    digests = {key: _digest(_decoded(value)) for key, value in encoded}
    digests |= {key: _digest(value.encode()) for key, value in plain}
    return {**kept, "data": digests} if digests else kept


def _items(manifest: Manifest, field: str) -> list[tuple[str, str]]:
    return list((manifest.get(field) or {}).items())


def _decoded(value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        return value.encode()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _shared(value: Any) -> Any:
    """Intern short strings: the JSON of many objects repeats them."""
    if isinstance(value, dict):
        return {sys.intern(key): _shared(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shared(item) for item in value]
    if isinstance(value, str) and len(value) <= _SHARED_LENGTH:
        return sys.intern(value)
    return value
