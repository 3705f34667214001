"""What the resources of other platforms share: containers with vLLM's arguments, GPUs, environment and placement."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from pagemill.converting.deployment import Draft, model_source
from pagemill.converting.vllm import apply_arguments

GPU = "nvidia.com/gpu"
POD_FIELDS = (
    "nodeSelector",
    "tolerations",
    "affinity",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "imagePullSecrets",
    "topologySpreadConstraints",
    "securityContext",
    "serviceAccountName",
)
"""Fields of a pod that `spec.template.spec` takes as they are."""
ARGUMENT_VARIABLES = ("VLLM_ADDITIONAL_ARGS", "VLLM_ARGS")


def draft_of(document: Mapping[str, Any]) -> Draft:
    """Return a draft with the name and namespace of a resource."""
    metadata = document.get("metadata") or {}
    draft = Draft(str(metadata.get("name") or "model"))
    if metadata.get("namespace"):
        draft.metadata["namespace"] = metadata["namespace"]
    return draft


def take_adapters(draft: Draft, listed: list[Mapping[str, Any]] | None, address: str) -> None:
    """Set adapters from a list of names and addresses, which stand under the key `address`."""
    adapters = [{"name": each.get("name"), "source": model_source(str(each.get(address)))} for each in listed or []]
    draft.set("model.adapters", adapters or None)


def take_arguments(draft: Draft, container: Mapping[str, Any], env: list[dict[str, Any]]) -> None:
    """Read vLLM's arguments from a container's command line and from the variables that images add to it."""
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    if len(words) >= 2 and words[0].endswith(("sh", "bash")):
        words = shlex.split(words[-1].replace("\\\n", " "))
    for variable in [each for each in env if each.get("name") in ARGUMENT_VARIABLES]:
        words += shlex.split(str(variable.get("value") or ""))
        env.remove(variable)
    first = next((number for number, word in enumerate(words) if word.startswith("--")), len(words))
    kept = [word for word in words[first:] if not re.fullmatch(r"\$\(?\{?\w+\}?\)?", word)]
    apply_arguments(draft, kept)


def take_resources(draft: Draft, resources: Mapping[str, Any]) -> int | None:
    """Set memory and CPU; return the GPUs."""
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    both = {**limits, **requests}
    for name in ("cpu", "memory"):
        draft.set(f"resources.{name}", None if name not in both else str(both[name]))
    for name in both.keys() - {"cpu", "memory", GPU}:
        draft.note(f"resources.{name}", "Set it by spec.template.spec.containers, or not at all.")
    gpus = limits.get(GPU, requests.get(GPU))
    return None if gpus is None else int(gpus)


def take_env(draft: Draft, env: list[dict[str, Any]]) -> None:
    """Set variables; a token of Hugging Face becomes the model's credentials."""
    kept = []
    for variable in env:
        secret = (variable.get("valueFrom") or {}).get("secretKeyRef")
        if variable.get("name") in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") and secret:
            draft.set("model.credentialsSecretRef", {"name": secret["name"], "key": secret["key"]})
        elif str(variable.get("name", "")).startswith("VLLM_"):
            draft.note(f"env {variable['name']}", "Is vLLM's own; this engine does not read it.")
        else:
            kept.append(variable)
    draft.set("engine.env", kept or None)


def take_pod(draft: Draft, pod: Mapping[str, Any], where: str) -> None:
    """Copy placement and security; note other fields."""
    spec = {name: pod[name] for name in POD_FIELDS if pod.get(name)}
    draft.set("template.spec", spec or None)
    draft.note_rest(where, {name: value for name, value in pod.items() if name not in POD_FIELDS}, {})
