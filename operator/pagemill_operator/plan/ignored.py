"""Finds the fields that are set and have no effect: on this backend, or beside the values of other fields.

The plan is carried out without them, so that stored objects stay valid; the condition `FieldsSupported` and
`pagemill up` name each with its value and a remedy. Fields that must not be ignored are problems (`support`). `unused`
names the fields that have no effect with the kind of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from pagemill_crds.models import LLMDeploymentSpec
from pagemill_crds.sections.autoscaling import AutoscalingSection
from pagemill_models.sources import SourceError, find_kind, in_full
from pagemill_operator.autoscaler.registry import registered
from pagemill_operator.plan.engine import lacks_head
from pagemill_operator.plan.extra_args import FIELD, IGNORED_UNLESS
from pagemill_operator.plan.support import Backend
from pagemill_operator.plan.types import Problem

MAX_VALUE_CHARS = 80
ONLY_IN_A_CLUSTER = "it has an effect in a cluster only, not on this machine; remove it, or keep it for a cluster"


def find_ignored(spec: LLMDeploymentSpec, backend: Backend, settings: dict[str, dict[str, Any]]) -> Iterator[Problem]:
    """Yield the fields that have no effect; `settings` is the content of the engine's settings file."""
    speculative = spec.engine.speculative
    if speculative is not None and lacks_head(speculative):
        message = "method eagle3 needs a head that was trained for the model; name it by source, or set method to auto"
        yield Problem("spec.engine.speculative", speculative.method, message)
    if spec.engine.image is not None and spec.engine.version is not None:
        message = "spec.engine.image names the whole image; put the version into its tag, or remove one of the fields"
        yield Problem("spec.engine.version", spec.engine.version, message)
    if spec.cost is not None and spec.cost.gpu_hour is not None and not spec.resources.gpus:
        message = "replicas have no GPUs; set spec.resources.gpus, or give their price as spec.cost.hour"
        yield Problem("spec.cost.gpuHour", spec.cost.gpu_hour, message)
    if spec.routing.session_header is not None and spec.routing.policy != "Auto":
        message = f"routing policy {spec.routing.policy} does not keep sessions; set spec.routing.policy to Auto"
        yield Problem("spec.routing.sessionHeader", spec.routing.session_header, message)
    yield from _credentials_key(spec)
    if spec.autoscaling is not None:
        yield from _of_autoscaling(spec.autoscaling)
    yield from _extra_args(spec, settings)
    if backend == "local":
        yield from _only_in_a_cluster(spec)


def _credentials_key(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    reference = spec.model.credentials_secret_ref
    if reference is None or "key" not in reference.model_fields_set:
        return
    try:
        keys = [credential.key for credential in find_kind(in_full(spec.model.source)).credentials]
    except SourceError:
        return  # `support` reports the source
    if keys and None not in keys:
        message = f"credentials of this source are read from {', '.join(str(key) for key in keys)}; remove key"
        yield Problem("spec.model.credentialsSecretRef.key", reference.key, message)


def _of_autoscaling(section: AutoscalingSection) -> Iterator[Problem]:
    if section.warm and section.mode == "Advisory":
        message = "in mode Advisory the operator starts no replica; set mode to Active, or remove it"
        yield Problem("spec.autoscaling.warm", section.warm, message)
    policy = registered().policies.get(section.policy)
    has_latencies = section.slo is not None and (section.slo.ttft or section.slo.tpot)
    if has_latencies and policy is not None and not policy.reads_slo:
        message = (
            f"scaling policy {section.policy} does not scale by it, only the condition SLOMet does use it; "
            "set policy to Demand"
        )
        yield Problem("spec.autoscaling.slo", short_value(section.slo), message)


def _extra_args(spec: LLMDeploymentSpec, settings: dict[str, dict[str, Any]]) -> Iterator[Problem]:
    for name, (needed, value, remedy) in IGNORED_UNLESS.items():
        if name in settings["engine"] and settings["engine"].get(needed) != value:
            option = f"--{name.replace('_', '-')}"
            for index, argument in enumerate(spec.engine.extra_args):
                if argument.partition("=")[0] == option:
                    yield Problem(f"{FIELD}[{index}]", argument, remedy)


def _only_in_a_cluster(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    if spec.autoscaling and spec.autoscaling.mode == "External":
        message = "no HPA or KEDA runs on this machine; edit replicas in the file, or set mode to Active"
        yield Problem("spec.autoscaling.mode", spec.autoscaling.mode, message)
    fields: dict[str, Any] = {
        "spec.engine.image": spec.engine.image,
        "spec.engine.version": spec.engine.version if spec.engine.image is None else None,
        "spec.engine.podsPerReplica": None if spec.engine.pods_per_replica == 1 else spec.engine.pods_per_replica,
        "spec.resources.memory": spec.resources.memory,
        "spec.resources.gpuProduct": spec.resources.gpu_product,
        "spec.model.cache": spec.model.cache,
        "spec.template.metadata": spec.template.metadata if spec.template else None,
        "spec.template.spec": spec.template.spec if spec.template else None,
    }
    for field, value in fields.items():
        if value is not None:
            yield Problem(field, short_value(value), ONLY_IN_A_CLUSTER)


def short_value(value: Any) -> str:
    """Return the value as text; of a section, the names of the fields that are set."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_unset=True)
    text = ", ".join(map(str, value)) if isinstance(value, dict) else str(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."
