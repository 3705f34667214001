"""KServe's `LLMInferenceService` (serving.kserve.io)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagemill.converting.deployment import ConvertError, Draft, model_source
from pagemill.converting.kubernetes import draft_of, take_adapters, take_arguments, take_env, take_pod, take_resources
from pagemill.converting.vllm import set_gpus

KIND = "LLMInferenceService"
MEANINGS: Mapping[str, str] = {
    "router": "The gateway routes by what engines report; nothing has to be installed for it. See spec.routing.",
    "prefill": "Prefill and decode run in one engine.",
    "worker": "The operator makes the pods of a replica alike: spec.engine.podsPerReplica.",
    "baseRefs": "Nothing is merged into a deployment: convert the merged resource.",
    "tracing": "The chart sets where traces go.",
    "kvCacheOffloading": "The KV cache stays on its device.",
    "rolloutStrategy": "See spec.rollout.",
    "storageInitializer": "See spec.model.cache.",
    "labels": "Set them by spec.template.metadata.labels.",
    "annotations": "Set them by spec.template.metadata.annotations.",
}
PARALLEL = {"tensor": "engine.tensorParallel", "pipeline": "engine.pipelineParallel"}


def from_service(document: Mapping[str, Any]) -> Draft:
    """Raises `ConvertError`."""
    spec = dict(document.get("spec") or {})
    draft = draft_of(document)
    pod = dict(spec.pop("template", None) or {})
    containers = list(pod.pop("containers", None) or [])
    main = next((each for each in containers if each.get("name") == "main"), containers[0] if containers else {})
    env = [dict(each) for each in main.get("env") or []]
    take_arguments(draft, main, env)
    _take_model(draft, dict(spec.pop("model", None) or {}))
    _take_parallelism(draft, dict(spec.pop("parallelism", None) or {}))
    take_env(draft, env)
    set_gpus(draft, take_resources(draft, main.get("resources") or {}))
    take_pod(draft, pod, "template.")
    for other in containers:
        if other is not main:
            draft.note(f"template.containers {other.get('name')}", "Further containers: spec.template.spec.containers.")
    _take_scaling(draft, spec)
    draft.note_rest("", spec, MEANINGS)
    return draft


def _take_model(draft: Draft, model: dict[str, Any]) -> None:
    uri = model.pop("uri", None)
    if not uri:
        raise ConvertError(f"{KIND} {draft.metadata['name']}: spec.model.uri is missing.")
    draft.set("model.source", model_source(str(uri)))
    draft.set("model.name", model.pop("name", None))
    lora = dict(model.pop("lora", None) or {})
    take_adapters(draft, lora.pop("adapters", None), "uri")
    for key, field in (("maxRank", "maxLoraRank"), ("maxAdapters", "maxLoras"), ("maxCpuAdapters", "maxCpuLoras")):
        draft.set(f"engine.lora.{field}", lora.pop(key, None))
    draft.note_rest("model.lora.", lora, {})
    draft.note_rest("model.", model, {})


def _take_parallelism(draft: Draft, parallelism: dict[str, Any]) -> None:
    for key, path in PARALLEL.items():
        draft.set(path, parallelism.pop(key, None))
    draft.note_rest("parallelism.", parallelism, {"data": "Set spec.replicas: each is one engine."})


def _take_scaling(draft: Draft, spec: dict[str, Any]) -> None:
    draft.set("replicas", spec.pop("replicas", None))
    scaling = dict(spec.pop("scaling", None) or {})
    if not scaling:
        return
    least, most = (
        scaling.pop("min", scaling.pop("minReplicas", 1)),
        scaling.pop("max", scaling.pop("maxReplicas", None)),
    )
    draft.set("autoscaling.minReplicas", least)
    draft.set("autoscaling.maxReplicas", most or max(1, int(least or 1)))
    meaning = "The operator scales by predicted latency: set spec.autoscaling.slo; mode External leaves it to others."
    draft.note_rest("scaling.", scaling, dict.fromkeys(scaling, meaning))
