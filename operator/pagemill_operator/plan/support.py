"""Finds the fields that this version cannot carry out, and those whose consequences are easily overlooked.

A field that changes answers or resources is refused with a remedy. Neighbour: `ignored` finds the fields that only
tune and have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Literal

from pagemill_crds.invalid import each_on_its_own, usable
from pagemill_crds.models import LLMDeploymentSpec
from pagemill_crds.sections.model import Cache
from pagemill_models.sources import SourceError, find_kind, in_full
from pagemill_operator.autoscaler.registry import UnknownPolicyError, find_policy
from pagemill_operator.plan.pod_template import template_notes, template_problems
from pagemill_operator.plan.types import Problem
from pagemill_protocol.resource.quantities import cpu_cores

Backend = Literal["local", "kubernetes"]
LOADED_QUANTIZATIONS = ("none", "int8", "int4", "w8a8", "fp8")
GPU_QUANTIZATIONS = ("w8a8", "fp8")
MOST_PROCESSES = 64
CPU_ONLY = "only the CPU's kernels do that in this version; turn it off, or set spec.resources.gpus to 0"
GPU_ONLY = "only a GPU's kernels do that; set spec.resources.gpus to 1"


def pods_per_replica(spec: LLMDeploymentSpec, backend: Backend) -> int:
    """Return the number of pods of one replica. On one machine all its processes are of one engine."""
    if backend == "local":
        return 1
    gpus, size = spec.resources.gpus, spec.engine.tensor_parallel * spec.engine.pipeline_parallel
    return spec.engine.pods_per_replica or (size // gpus if gpus else 1)


def find_problems(spec: LLMDeploymentSpec, backend: Backend) -> Iterator[Problem]:
    """Return the problems of the spec, or of the valid part of a partially read one."""
    checks = [_quantization_problems, _float16_problems, _pipeline_parallel_problems]
    checks += [_process_problems, _gpu_problems, _policy_problems]
    if backend == "local":
        checks += [_env_problems, _credentials_problems]
    else:
        checks += [_pod_problems, _source_problems, _draft_claim_problems, _loader_problems]
        checks += [template_problems]
    return each_on_its_own(partial(check, spec) for check in checks)


def _source_problems(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    """Yield the problem of a source that no installed kind can read, or that its kind does not accept."""
    draft, sources = _draft_source(spec), {"spec.model.source": spec.model.source.strip()}
    if draft is not None:
        sources["spec.engine.speculative.source"] = draft
    for field, source in sources.items():
        try:
            find_kind(in_full(source)).check(in_full(source), field)
        except SourceError as error:
            yield Problem(field, source, error.message)


def _draft_claim_problems(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    draft = _draft_source(spec)
    if draft is None or not draft.startswith("pvc://"):
        return
    claim, mounted = (source.split("/")[2] for source in (draft, f"{in_full(spec.model.source)}//"))
    if spec.model.cache is not None or not spec.model.source.startswith("pvc://") or claim != mounted:
        message = "only the claim of spec.model.source is mounted; store what drafts on it, and name both by pvc://"
        yield Problem("spec.engine.speculative.source", draft, message)


def _draft_source(spec: LLMDeploymentSpec) -> str | None:
    speculative = spec.engine.speculative
    return None if speculative is None else speculative.source


def _loader_problems(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    cache = spec.model.cache
    if spec.model.credentials_secret_ref is not None and cache is None:
        yield Problem(
            "spec.model.credentialsSecretRef",
            spec.model.credentials_secret_ref.name,
            "credentials reach the loader of a cache, never an engine; set spec.model.cache, or pass the token to the "
            "engine yourself with spec.engine.env",
        )


def _gpu_problems(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    if spec.resources.gpus and spec.engine.deterministic:
        yield Problem("spec.engine.deterministic", True, CPU_ONLY)


def _quantization_problems(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    engine = spec.engine
    if engine.quantization not in LOADED_QUANTIZATIONS:
        yield Problem(
            "spec.engine.quantization",
            engine.quantization,
            f"this version quantizes weights to {', '.join(LOADED_QUANTIZATIONS[1:])} while loading; use one of these, "
            "or a GGUF file that is quantized already with quantization none",
        )
    if spec.resources.gpus:
        return
    if engine.quantization in GPU_QUANTIZATIONS:
        yield Problem("spec.engine.quantization", engine.quantization, f"{GPU_ONLY}, or use int8 or int4")
    if engine.kv_cache_dtype == "fp8":
        yield Problem("spec.engine.kvCacheDtype", engine.kv_cache_dtype, f"{GPU_ONLY}, or use int8")


def _float16_problems(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    """Yield settings that only the CPU's kernels support, and not with float16."""
    engine = spec.engine
    if engine.dtype != "float16" or spec.resources.gpus:
        return
    message = "works with dtype auto, float32 or bfloat16 only in this version, not with float16; change one of them"
    if engine.deterministic:
        yield Problem("spec.engine.deterministic", True, message)
    if engine.kv_cache_dtype not in ("auto", engine.dtype):
        yield Problem("spec.engine.kvCacheDtype", engine.kv_cache_dtype, message)


def _pod_problems(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    """Yield the problem of pods with other numbers of parts and GPUs: each part computes on a GPU of its own."""
    gpus, pods = spec.resources.gpus, spec.engine.pods_per_replica
    size = spec.engine.tensor_parallel * spec.engine.pipeline_parallel
    if gpus and pods is not None and gpus * pods != size:
        message = (
            f"{size} parts (tensorParallel x pipelineParallel) in {pods} pods are {size // pods} in each, but each has "
            f"{gpus} GPUs; remove it, or set spec.resources.gpus to {size // pods}"
        )
        yield Problem("spec.engine.podsPerReplica", pods, message)


def _pipeline_parallel_problems(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    size, speculative = spec.engine.pipeline_parallel, spec.engine.speculative
    if size > 1 and speculative is not None and speculative.method in ("draft", "eagle3", "mtp"):
        message = "what drafts computes in no stages; set it to 1, or spec.engine.speculative.method to auto"
        yield Problem("spec.engine.pipelineParallel", size, message)


def _process_problems(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    """Yield the problems of the number of processes that compute a model together."""
    size, stages, cpu = spec.engine.tensor_parallel, spec.engine.pipeline_parallel, spec.resources.cpu
    cores = 0 if cpu is None else math.ceil(cpu_cores(cpu))
    here = size * stages // (spec.engine.pods_per_replica or 1)
    message = None
    if size * stages > MOST_PROCESSES:
        message = f"tensorParallel x pipelineParallel may be {MOST_PROCESSES} processes at most; lower them"
    elif not spec.resources.gpus and 0 < cores < here:
        message = f"{here} processes need a core each; lower it, or raise spec.resources.cpu"
    if message is not None:
        name, value = ("tensorParallel", size) if size >= stages else ("pipelineParallel", stages)
        yield Problem(f"spec.engine.{name}", value, message)


def _policy_problems(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    """Yield the problem of a scaling policy that no installed package has."""
    if spec.autoscaling is None or spec.autoscaling.mode == "External":
        return
    try:
        find_policy(spec.autoscaling.policy)
    except UnknownPolicyError as error:
        yield Problem("spec.autoscaling.policy", spec.autoscaling.policy, str(error))


def _env_problems(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    for index, variable in usable(spec.engine.env):
        if variable.value_from is not None:
            yield Problem(
                f"spec.engine.env[{index}].valueFrom",
                variable.name,
                "there are no Secrets and ConfigMaps on this machine; set value",
            )


def _credentials_problems(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    if spec.model.credentials_secret_ref is not None:
        yield Problem(
            "spec.model.credentialsSecretRef",
            spec.model.credentials_secret_ref.name,
            "there are no Secrets on this machine; remove it, and log in as the source's own tools do "
            "(`hf auth login`, `AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `docker login`)",
        )


def find_notes(spec: LLMDeploymentSpec, backend: Backend) -> Iterator[Problem]:
    """Yield the fields that have a consequence in a cluster which is easily overlooked."""
    if backend == "local":
        return
    if _meets_on_one_node(spec):
        message = (
            "a ReadWriteOnce volume keeps all pods on one node, during a rollout both the old and the new ones; "
            "for more nodes create it with accessMode ReadWriteMany"
        )
        yield Problem("spec.model.cache.accessMode", "ReadWriteOnce", message)
    elif (pods := pods_per_replica(spec, backend)) > 1:
        yield Problem("spec.model.cache", pods, _cache_of_group(spec.model.cache))
    yield from template_notes(spec)


def _cache_of_group(cache: Cache | None) -> str:
    """Return what the pods of a group read the model from, and what that needs."""
    if cache is None:
        return (
            "each pod of a group reads spec.model.source by itself, again at each start; a cache keeps what is remote: "
            "a claim with accessMode ReadWriteMany for all pods, or a hostPath on each node"
        )
    if cache.host_path is not None:
        return (
            "each node fetches the whole model into its hostPath once, for all pods there; every node that may run a "
            "pod of a group needs room for it"
        )
    if cache.image_volume:
        return "each node pulls the model's image once; every node that may run a pod of a group needs room for it"
    return (
        "all pods of a group read one claim, which is filled once; its volume must let several nodes mount it "
        "(ReadWriteMany, or ReadOnlyMany for a claim of your own)"
    )


def _meets_on_one_node(spec: LLMDeploymentSpec) -> bool:
    """Whether several pods share a volume that only one node can mount."""
    cache = spec.model.cache
    if cache is None or cache.size is None or cache.access_mode == "ReadWriteMany":
        return False
    most = spec.autoscaling.max_replicas if spec.autoscaling else spec.replicas
    return most * pods_per_replica(spec, "kubernetes") > 1 or (
        spec.rollout.strategy != "Replace" and spec.rollout.max_surge not in (0, "0%")
    )
