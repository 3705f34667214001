"""Which fields this version's engine and gateway cannot honour yet, and which have no effect on this kind of backend.

A field that changes answers or resources is refused with a remedy; one that only tunes is noted. Nothing is ignored
silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pagemill_crds.models import LLMDeploymentSpec
from pagemill_crds.sections.routing import Queue
from pagemill_operator.plan.types import Problem

Backend = Literal["local", "kubernetes"]


def find_problems(spec: LLMDeploymentSpec, backend: Backend) -> Iterator[Problem]:
    """Fields that cannot be honoured."""
    engine, resources = spec.engine, spec.resources
    if resources.gpus:
        yield Problem("spec.resources.gpus", resources.gpus, "the engine runs on CPU in this version; set gpus to 0")
    if engine.quantization != "none":
        yield Problem(
            "spec.engine.quantization",
            engine.quantization,
            "weights are not quantized while loading in this version; use a GGUF file that is quantized already, "
            "or set quantization to none",
        )
    if engine.tensor_parallel * engine.pipeline_parallel > 1:
        field = "tensorParallel" if engine.tensor_parallel > 1 else "pipelineParallel"
        value = max(engine.tensor_parallel, engine.pipeline_parallel)
        yield Problem(f"spec.engine.{field}", value, "a replica is one process in this version; set it to 1")
    if spec.model.adapters:
        yield Problem(
            "spec.model.adapters", len(spec.model.adapters), "adapters are not served in this version; remove them"
        )
    if spec.model.generation_defaults:
        yield Problem(
            "spec.model.generationDefaults",
            "",
            "defaults are not applied in this version; remove them and send the values with each request",
        )
    if backend == "local":
        yield from _local_problems(spec)


def _local_problems(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    for index, variable in enumerate(spec.engine.env):
        if variable.value_from:
            yield Problem(
                f"spec.engine.env[{index}].valueFrom",
                variable.name,
                "there are no Secrets and ConfigMaps on this machine; set value",
            )
    if spec.model.credentials_secret_ref:
        yield Problem(
            "spec.model.credentialsSecretRef",
            spec.model.credentials_secret_ref.name,
            "there are no Secrets on this machine; remove it and log in with `hf auth login`",
        )


def find_notes(spec: LLMDeploymentSpec, backend: Backend) -> Iterator[Problem]:
    """Fields without effect here."""
    if spec.engine.speculative:
        yield Problem("spec.engine.speculative", spec.engine.speculative.method, "not used in this version")
    if spec.engine.deterministic and spec.engine.dtype != "float32":
        yield Problem("spec.engine.deterministic", True, "exact only with dtype float32 in this version")
    if spec.routing.session_header:
        yield Problem("spec.routing.sessionHeader", spec.routing.session_header, "not used in this version")
    if spec.routing.queue != Queue():
        message = "the gateway keeps no queue in this version: a request that finds no room gets 503"
        yield Problem("spec.routing.queue", "", message)
    if spec.autoscaling and spec.autoscaling.mode == "Active":
        yield Problem("spec.autoscaling", spec.autoscaling.mode, "nothing scales by itself in this version")
    if backend == "local":
        yield from _local_notes(spec)


def _local_notes(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    only_in_a_cluster = {
        "spec.engine.image": spec.engine.image,
        "spec.engine.version": spec.engine.version,
        "spec.resources.memory": spec.resources.memory,
        "spec.model.cache": spec.model.cache,
        "spec.template": spec.template,
    }
    for field, value in only_in_a_cluster.items():
        if value is not None:
            yield Problem(field, str(value)[:80], "has no effect on this machine, only in a cluster")
