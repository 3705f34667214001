"""`make_plan` turns one LLMDeployment into its plan. Deterministic: the same resource gives an equal plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from pagemill_crds.invalid import each_on_its_own
from pagemill_crds.models import LLMDeployment
from pagemill_crds.sections.autoscaling import DEFAULT_OBJECTIVE
from pagemill_crds.sections.model import Cache, SecretRef
from pagemill_crds.sections.rollout import ZERO
from pagemill_operator.autoscaler.settings import settings_of
from pagemill_operator.plan.engine import engine_settings, server_settings, source_with_revision, without_names
from pagemill_operator.plan.extra_args import apply_extra_args
from pagemill_operator.plan.ignored import find_ignored
from pagemill_operator.plan.support import Backend, find_notes, find_problems, pods_per_replica
from pagemill_operator.plan.types import (
    Group,
    ModelCachePlan,
    Plan,
    Probe,
    Problem,
    Process,
    SecretKey,
)
from pagemill_protocol.engine_ports import CONTROL_PORT, DATA_PORT
from pagemill_protocol.report.adapters import WantedAdapter
from pagemill_protocol.resource.quantities import cpu_cores, duration_seconds, memory_bytes
from pagemill_protocol.resource.served import Claimant, ServedModel, WatchedSpec, name_owners, served_model

ENGINE_MODULE = "pagemill_engine.server"
GROUP_TIMEOUT_S = 900.0
"""Seconds for which the pods of a group wait for each other. A group that is not complete then begins anew, so that it
does not hold its places for ever."""
STARTUP_LIMIT_S = 90
"""Seconds until the control port must answer. The engine opens it before loading, so a large model needs no longer."""


def make_plan(deployment: LLMDeployment, backend: Backend = "local") -> Plan:
    """Return the plan; its `problems` name the fields that cannot be carried out."""
    spec = deployment.spec
    settings = {"engine": engine_settings(deployment), "server": server_settings(deployment)}
    num_pods = pods_per_replica(spec, backend)
    if num_pods > 1:
        nodes = {"count": num_pods, "of_group": True, "timeout_s": GROUP_TIMEOUT_S}
        settings["engine"]["nodes"] = nodes
    slo = spec.autoscaling.slo if spec.autoscaling is not None else None
    replica_price = spec.cost.of_replica(spec.resources.gpus * num_pods) if spec.cost is not None else None
    problems = [*find_problems(spec, backend), *apply_extra_args(spec.engine.extra_args, settings)]
    return Plan(
        namespace=deployment.metadata.namespace,
        name=deployment.metadata.name,
        generation=deployment.metadata.generation,
        served=_served(deployment),
        source=source_with_revision(deployment),
        groups=(_engine_group(deployment, settings, num_pods),),
        autoscaling=settings_of(spec.autoscaling, replica_price),
        spec_replicas=desired_replicas(deployment),
        cache=_model_cache(spec.model.cache),
        replica_price=replica_price,
        objective=slo.objective if slo is not None and slo.objective is not None else DEFAULT_OBJECTIVE,
        credentials=_secret_key(spec.model.credentials_secret_ref),
        adapters=tuple(
            WantedAdapter(name=each.name, source=each.source, pinned=each.pinned) for each in spec.model.adapters
        ),
        problems=tuple(problems),
        ignored=tuple(find_ignored(spec, backend, settings)),
        notes=tuple(find_notes(spec, backend)),
    )


def _served(deployment: LLMDeployment) -> ServedModel:
    spec = deployment.spec.model_dump(mode="json", by_alias=True)
    return served_model(deployment.metadata.name, msgspec.convert(spec, WatchedSpec))


def partial_problems(deployment: LLMDeployment, backend: Backend = "local") -> list[Problem]:
    """Return the problems that `make_plan` would find in the valid part of a partially read deployment."""
    unused: dict[str, dict[str, Any]] = {"engine": {}, "server": {}}
    checks = (
        lambda: find_problems(deployment.spec, backend),
        lambda: apply_extra_args(deployment.spec.engine.extra_args, unused),
    )
    return list(each_on_its_own(checks))


def name_conflicts(plans: Sequence[Claimant]) -> dict[str, Problem]:
    """Return, by key, the deployments that claim a name which an older one holds alone. `plans` come oldest first.

    A name is shared (a canary) if all of its claimants set `routing.weight`. A deployment with a conflict gets no name.
    """
    return {each.key: _name_conflict(*taken) for each, taken in name_owners(plans) if taken is not None}


def _name_conflict(name: str, holder: str) -> Problem:
    message = (
        f"{holder} serves the name {name} already; choose another name, or set spec.routing.weight in both to share it"
    )
    return Problem("spec.model.name", name, message)


def desired_replicas(deployment: LLMDeployment) -> int:
    """Return the replicas to start with: `spec.replicas` within the bounds of an active autoscaler."""
    autoscaling = deployment.spec.autoscaling
    if autoscaling is None or autoscaling.mode != "Active":
        return deployment.spec.replicas
    return min(max(deployment.spec.replicas, autoscaling.min_replicas), autoscaling.max_replicas)


def _engine_group(deployment: LLMDeployment, settings: dict[str, Any], num_pods: int) -> Group:
    spec = deployment.spec
    process = _engine_process(deployment, settings, num_pods)
    template = spec.template.model_dump(mode="json", exclude_none=True) if spec.template else {}
    replaces = spec.rollout.strategy == "Replace"
    return Group(
        name=deployment.metadata.name,
        replicas=desired_replicas(deployment),
        process=process,
        pods_per_replica=num_pods,
        digest=_digest(process, spec.engine.image, spec.engine.version, template),
        strategy=spec.rollout.strategy,
        max_surge=0 if replaces else spec.rollout.max_surge,
        max_unavailable=1 if replaces and spec.rollout.max_unavailable in ZERO else spec.rollout.max_unavailable,
        image=spec.engine.image,
        version=spec.engine.version,
        template=template,
    )


def _engine_process(deployment: LLMDeployment, settings: dict[str, Any], num_pods: int) -> Process:
    engine, resources = deployment.spec.engine, deployment.spec.resources
    startup_period_s = 2.0
    return Process(
        module=ENGINE_MODULE,
        settings=settings,
        environment={variable.name: variable.value for variable in engine.env if variable.value is not None},
        environment_from={
            variable.name: variable.value_from.model_dump(mode="json", exclude_none=True)
            for variable in engine.env
            if variable.value_from
        },
        ports={"data": DATA_PORT, "control": CONTROL_PORT},
        startup=Probe(CONTROL_PORT, "/livez", startup_period_s, int(STARTUP_LIMIT_S / startup_period_s)),
        readiness=Probe(CONTROL_PORT, "/readyz", 1.0, 3),
        liveness=Probe(CONTROL_PORT, "/livez", 5.0, 6),
        cpu_cores=None if resources.cpu is None else cpu_cores(resources.cpu),
        memory_bytes=None if resources.memory is None else memory_bytes(resources.memory),
        gpus=engine.tensor_parallel * engine.pipeline_parallel // num_pods if resources.gpus else 0,
        gpu_product=resources.gpu_product,
        drain_timeout_s=duration_seconds(deployment.spec.rollout.drain_timeout),
    )


def _model_cache(cache: Cache | None) -> ModelCachePlan | None:
    if cache is None:
        return None
    access_mode = cache.access_mode or ModelCachePlan.access_mode
    limit_bytes = None if cache.size_limit is None else memory_bytes(cache.size_limit)
    return ModelCachePlan(
        claim_name=cache.claim_name,
        size=cache.size,
        storage_class_name=cache.storage_class_name,
        access_mode=access_mode,
        host_path=cache.host_path,
        size_limit_bytes=limit_bytes,
        image_volume=bool(cache.image_volume),
    )


def _secret_key(reference: SecretRef | None) -> SecretKey | None:
    return SecretKey(reference.name, reference.key) if reference else None


def _digest(process: Process, image: str | None, version: str | None, template: dict[str, Any]) -> str:
    parts = [
        process.module,
        without_names(process.settings),
        process.environment,
        process.environment_from,
        [process.cpu_cores, process.memory_bytes, process.gpus, process.gpu_product],
        [image, version, template],
    ]
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
