"""Names and labels of all children, and digests of content. The gateway and the chart rely on them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pagemill_crds import KIND, STORED_API_VERSION
from pagemill_operator.backends.kubernetes.snapshot import (
    COMPONENT_LABEL,
    MANAGED_BY_LABEL,
    NAME_LABEL,
    OWNER_LABEL,
    Manifest,
    Owner,
)
from pagemill_operator.plan.types import Plan

ENGINE, LOADER = "engine", "loader"
GENERATION_ANNOTATION = "pagemill.dev/generation"
"""On the Deployment: the generation of the resource that it was rendered from."""
AWAKE_ANNOTATION = "pagemill.dev/awake"
"""On the Deployment: how many of its replicas serve; the others hold the weights and sleep."""
IN_PLACE_ANNOTATION = "pagemill.dev/in-place"
"""On the Deployment: why its rollout replaces replicas in place."""
SLEEP_ANNOTATION = "pagemill.dev/rest"
"""On pods: `asleep` if the pod was ordered to sleep, `waking` if it was woken and has not been ready since."""
TEMPLATE_ANNOTATION = "pagemill.dev/template"
"""On pods: the digest of the pod template that they were made from; it distinguishes new pods from old ones."""
ADAPTERS_ANNOTATION = "pagemill.dev/adapters"
"""On pods: the digest of the list of adapters that was written last. Kubelets renew a pod's files when it
changes, instead of at their next sync.
"""


def awake_note(plan: Plan) -> str | None:
    """Return the value of the Deployment's awake annotation, or None if no replica ever sleeps."""
    return str(plan.replicas) if plan.autoscaling is not None and plan.autoscaling.warm else None


def engine_name(name: str) -> str:
    return f"{name}-engine"


def token_name(name: str) -> str:
    return f"{name}-engine-token"


def config_name(name: str, text: str) -> str:
    return f"{name}-engine-{digest(text, 10)}"


def adapters_name(name: str) -> str:
    return f"{name}-adapters"


def claim_name(name: str) -> str:
    return f"{name}-model"


def selector(name: str, component: str = ENGINE) -> dict[str, str]:
    return {OWNER_LABEL: name, COMPONENT_LABEL: component}


def selector_text(name: str) -> str:
    """Return the engine pods' selector in the form that the scale subresource shows."""
    return ",".join(f"{key}={value}" for key, value in selector(name).items())


def labels(name: str, component: str = ENGINE) -> dict[str, str]:
    return {
        NAME_LABEL: "pagemill-engine",
        "app.kubernetes.io/instance": name,
        COMPONENT_LABEL: component,
        "app.kubernetes.io/part-of": "pagemill",
        MANAGED_BY_LABEL: "pagemill-operator",
        OWNER_LABEL: name,
    }


def child(api_version: str, kind: str, name: str, owner: Owner, component: str = ENGINE, **content: Any) -> Manifest:
    """Return a manifest with the operator's labels and the owner reference that deletes it with its owner."""
    reference = {
        "apiVersion": STORED_API_VERSION,
        "kind": KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": labels(owner.name, component),
            "ownerReferences": [reference],
        },
        **content,
    }


def digest(content: Any, length: int) -> str:
    """Return a hexadecimal digest of a text or of JSON; the order of keys does not change it."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()[:length]
