"""Names and labels of all children, and digests of content. The gateway and the chart rely on them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pagemill_crds import KIND, STORED_API_VERSION
from pagemill_operator.backends.kubernetes.kinds import LEADER_WORKER_SET
from pagemill_operator.backends.kubernetes.snapshot import (
    COMPONENT_LABEL,
    MANAGED_BY_LABEL,
    NAME_LABEL,
    OWNER_LABEL,
    Manifest,
    Owner,
)
from pagemill_operator.plan.types import Plan

ENGINE, LOADER, WORKER = "engine", "loader", "worker"
"""Components of pods. `worker`: a pod of a group that only computes; the group's first pod is its engine."""
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


def group_name(name: str) -> str:
    """Return the name of the LeaderWorkerSet, whose controller makes a Service of the same name."""
    return f"{name}-group"


def workload_at(plan: Plan) -> tuple[str, str]:
    """Return kind and name of the object that makes the plan's pods."""
    if plan.pods_per_replica > 1:
        return LEADER_WORKER_SET.name, group_name(plan.name)
    return "Deployment", engine_name(plan.name)


def pod_template(workload: Manifest) -> Manifest:
    """Return the template of the pods that serve."""
    spec = workload["spec"]
    template: Manifest = (
        spec["leaderWorkerTemplate"]["leaderTemplate"] if "leaderWorkerTemplate" in spec else spec["template"]
    )
    return template


def template_of(manifest: Manifest) -> str:
    """Return the digest of the template of a pod, or of a template."""
    return str((manifest["metadata"].get("annotations") or {}).get(TEMPLATE_ANNOTATION, ""))


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


def group_pods(name: str) -> dict[str, Any]:
    """Return the label selector of all pods of groups."""
    components = {"key": COMPONENT_LABEL, "operator": "In", "values": [ENGINE, WORKER]}
    return {"matchLabels": {OWNER_LABEL: name}, "matchExpressions": [components]}


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
