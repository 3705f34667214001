"""KubeAI's `Model` (kubeai.org)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagemill.converting.deployment import ConvertError, Draft
from pagemill.converting.kubernetes import draft_of, take_adapters, take_env
from pagemill.converting.vllm import apply_arguments, set_gpus

KIND = "Model"
GROUP = "kubeai.org"
MEANINGS: Mapping[str, str] = {
    "targetRequests": "The operator scales by predicted latency: set spec.autoscaling.slo, or targets.queueDepth.",
    "loadBalancing": "The gateway routes by queues, cached prefixes and step times: see spec.routing.",
    "features": "The model's files say what it can do.",
    "owner": "Has no effect there either.",
    "cacheProfile": "Set spec.model.cache: a claim, a size or a host path.",
    "files": "Mount them by spec.template.spec.",
    "envFrom": "List the variables in spec.engine.env.",
    "image": "Images are this platform's own: spec.engine.version, or spec.engine.image for a mirror.",
    "priorityClassName": "Set it by spec.template.spec.priorityClassName.",
}


def from_model(document: Mapping[str, Any]) -> Draft:
    """Raises `ConvertError`."""
    draft, spec = draft_of(document), dict(document.get("spec") or {})
    engine = spec.pop("engine", "VLLM")
    url = str(spec.pop("url", "") or "")
    if not url:
        raise ConvertError(f"{GROUP} {KIND} {draft.metadata['name']}: spec.url is missing.")
    arguments = [str(each) for each in spec.pop("args", None) or []]
    if engine == "VLLM":
        apply_arguments(draft, [part for each in arguments for part in each.split(" ", 1)])
    else:
        draft.note(f"engine {engine}", "Served by this platform's engine; its arguments are not those of vLLM.")
        for argument in arguments:
            draft.note(argument, "Has no equal field.")
    _take_source(draft, url)
    draft.set("model.name", draft.get("model.name") or draft.metadata["name"])
    take_adapters(draft, spec.pop("adapters", None), "url")
    take_env(draft, [{"name": name, "value": str(value)} for name, value in (spec.pop("env", None) or {}).items()])
    _take_profile(draft, str(spec.pop("resourceProfile", "") or ""))
    _take_scaling(draft, spec)
    draft.note_rest("", spec, MEANINGS)
    return draft


def _take_source(draft: Draft, url: str) -> None:
    plain, _, query = url.partition("?")
    if plain.startswith("ollama://"):
        draft.note(url, "Ollama's registry is no source: name the same model's GGUF file, as hf://ORG/NAME/FILE.gguf.")
        plain = f"hf://{plain.removeprefix('ollama://').replace(':', '-')}"
    if query:
        draft.note(f"url ?{query}", "Parameters of the address are not read.")
    draft.set("model.source", plain)


def _take_profile(draft: Draft, profile: str) -> None:
    """Set GPUs by a profile such as `nvidia-gpu-l4:2`."""
    name, _, count = profile.partition(":")
    if "gpu" not in name:
        set_gpus(draft, 0)
        if name:
            draft.note(f"resourceProfile {profile}", "Set spec.resources.cpu and memory.")
        return
    set_gpus(draft, int(count) if count.isdigit() else 1)
    product = name.rpartition("gpu-")[2].upper()
    draft.note(f"resourceProfile {profile}", f"Set spec.resources.gpuProduct to your nodes' label for {product}.")


def _take_scaling(draft: Draft, spec: dict[str, Any]) -> None:
    replicas, most = spec.pop("replicas", None), spec.pop("maxReplicas", None)
    least, delay_s = spec.pop("minReplicas", 0), spec.pop("scaleDownDelaySeconds", None)
    if spec.pop("autoscalingDisabled", False) or most is None:
        draft.set("replicas", 1 if replicas is None else replicas)
        return
    draft.set("autoscaling.minReplicas", least)
    draft.set("autoscaling.maxReplicas", most)
    if least == 0:
        draft.set("autoscaling.scaleToZeroAfter", f"{30 if delay_s is None else delay_s}s")
    elif delay_s is not None:
        draft.set("autoscaling.behavior.scaleDown.stabilizationWindowSeconds", delay_s)
