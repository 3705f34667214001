"""Every field of the resource has an effect on each backend, or is refused, or is reported as ignored with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest

from pagemill_crds.base import Section
from pagemill_crds.models import LLMDeployment, LLMDeploymentSpec
from pagemill_operator.backends.kubernetes.render import render_children
from pagemill_operator.backends.kubernetes.snapshot import Owner, RenderContext
from pagemill_operator.plan import Plan, make_plan
from pagemill_operator.plan.support import Backend
from pagemill_operator.status.conditions import Finding, events_between, find_conditions
from pagemill_operator.status.observation import Observation

Make = Callable[..., LLMDeployment]
BACKENDS: tuple[Backend, ...] = ("local", "kubernetes")
SECRET = {"name": "a", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
CONFIG = {"name": "a", "valueFrom": {"configMapKeyRef": {"name": "s", "key": "k"}}}
HUB = {"model__source": "hf://org/name"}
SCALED = {"autoscaling__minReplicas": 0, "autoscaling__maxReplicas": 3}
RULE = {"type": "Pods", "value": 2, "periodSeconds": 10}
CLAIM = {**HUB, "model__cache__size": "1Gi"}
FOLDER = {**HUB, "model__cache__hostPath": "/models"}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model.source": ({}, HUB),
    "model.name": ({}, {"model__name": "other"}),
    "model.aliases": ({}, {"model__aliases": ["other"]}),
    "model.revision": (HUB, {"model__revision": "v2"}),
    "model.credentialsSecretRef.name": (CLAIM, {"model__credentialsSecretRef": {"name": "s"}}),
    "model.credentialsSecretRef.key": (
        {**CLAIM, "model__credentialsSecretRef": {"name": "s"}},
        {"model__credentialsSecretRef": {"name": "s", "key": "other"}},
    ),
    "model.chatTemplate": ({}, {"model__chatTemplate": "{{ messages }}"}),
    "model.toolCallParser": ({}, {"model__toolCallParser": "hermes"}),
    "model.reasoningParser": ({}, {"model__reasoningParser": "think"}),
    **{
        f"model.generationDefaults.{name}": ({}, {f"model__generationDefaults__{name}": value})
        for name, value in {
            "temperature": 0.5,
            "topP": 0.5,
            "topK": 5,
            "minP": 0.1,
            "repetitionPenalty": 1.1,
            "maxTokens": 9,
        }.items()
    },
    "model.adapters.name": ({}, {"model__adapters": [{"name": "a", "source": "hf://org/a"}]}),
    "model.adapters.source": ({}, {"model__adapters": [{"name": "a", "source": "hf://org/a"}]}),
    "model.adapters.pinned": (
        {"model__adapters": [{"name": "a", "source": "hf://org/a"}]},
        {"model__adapters": [{"name": "a", "source": "hf://org/a", "pinned": True}]},
    ),
    "model.cache.claimName": (HUB, {"model__cache__claimName": "c"}),
    "model.cache.size": (HUB, {"model__cache__size": "1Gi"}),
    "model.cache.storageClassName": (CLAIM, {"model__cache__storageClassName": "fast"}),
    "model.cache.accessMode": (CLAIM, {"model__cache__accessMode": "ReadWriteMany"}),
    "model.cache.hostPath": (HUB, {"model__cache__hostPath": "/models"}),
    "model.cache.sizeLimit": (FOLDER, {"model__cache__sizeLimit": "9Gi"}),
    "model.cache.imageVolume": ({"model__source": "oci://host/name:1"}, {"model__cache__imageVolume": True}),
    "engine.image": ({}, {"engine__image": "x:1"}),
    "engine.version": ({}, {"engine__version": "1.0.0"}),
    "engine.dtype": ({}, {"engine__dtype": "float32"}),
    "engine.quantization": ({}, {"engine__quantization": "int8"}),
    "engine.maxModelLen": ({}, {"engine__maxModelLen": 512}),
    "engine.maxNumSeqs": ({}, {"engine__maxNumSeqs": 8}),
    "engine.maxNumBatchedTokens": ({}, {"engine__maxNumBatchedTokens": 64}),
    "engine.blockSize": ({}, {"engine__blockSize": 32}),
    "engine.kvCacheMemory": ({}, {"engine__kvCacheMemory": "1Gi"}),
    "engine.kvCacheDtype": ({}, {"engine__kvCacheDtype": "int8"}),
    "engine.prefixCaching.enabled": ({}, {"engine__prefixCaching__enabled": False}),
    "engine.prefixCaching.scope": ({}, {"engine__prefixCaching__scope": "key"}),
    "engine.deterministic": ({}, {"engine__deterministic": True}),
    "engine.speculative.method": ({}, {"engine__speculative__method": "ngram"}),
    "engine.speculative.source": ({}, {"engine__speculative": {"method": "draft", "source": "hf://org/a"}}),
    "engine.speculative.numTokens": ({}, {"engine__speculative": {"method": "ngram", "numTokens": 2}}),
    "engine.lora.maxLoras": ({}, {"engine__lora": {"maxLoras": 2}}),
    "engine.lora.maxLoraRank": ({"engine__lora": {}}, {"engine__lora": {"maxLoraRank": 32}}),
    "engine.lora.maxCpuLoras": ({"engine__lora": {}}, {"engine__lora": {"maxCpuLoras": 4}}),
    "engine.tensorParallel": ({}, {"engine__tensorParallel": 2}),
    "engine.podsPerReplica": ({"engine__tensorParallel": 2}, {"engine__podsPerReplica": 2}),
    "engine.pipelineParallel": ({}, {"engine__pipelineParallel": 2}),
    "engine.extraArgs": ({}, {"engine__extraArgs": ["--seed=1"]}),
    "engine.env.name": ({}, {"engine__env": [{"name": "a", "value": "b"}]}),
    "engine.env.value": ({}, {"engine__env": [{"name": "a", "value": "b"}]}),
    "engine.env.valueFrom.secretKeyRef.name": ({}, {"engine__env": [SECRET]}),
    "engine.env.valueFrom.secretKeyRef.key": ({}, {"engine__env": [SECRET]}),
    "engine.env.valueFrom.configMapKeyRef.name": ({}, {"engine__env": [CONFIG]}),
    "engine.env.valueFrom.configMapKeyRef.key": ({}, {"engine__env": [CONFIG]}),
    "resources.gpus": ({}, {"resources__gpus": 1}),
    "resources.gpuProduct": ({"resources__gpus": 1}, {"resources__gpuProduct": "NVIDIA-L4"}),
    "resources.cpu": ({}, {"resources__cpu": 3}),
    "resources.memory": ({}, {"resources__memory": "2Gi"}),
    "replicas": ({}, {"replicas": 2}),
    "autoscaling.mode": (SCALED, {"autoscaling__mode": "External"}),
    "autoscaling.policy": (SCALED, {"autoscaling__policy": "TargetTracking"}),
    "autoscaling.minReplicas": (SCALED, {"autoscaling__minReplicas": 2}),
    "autoscaling.maxReplicas": (SCALED, {"autoscaling__maxReplicas": 4}),
    "autoscaling.warm": (SCALED, {"autoscaling__warm": 1}),
    "autoscaling.targets.kvCacheUsage": (SCALED, {"autoscaling__targets__kvCacheUsage": 0.5}),
    "autoscaling.targets.queueDepth": (SCALED, {"autoscaling__targets__queueDepth": 5}),
    "autoscaling.slo.ttft": (SCALED, {"autoscaling__slo__ttft": "1s"}),
    "autoscaling.slo.tpot": (SCALED, {"autoscaling__slo__tpot": "1s"}),
    "autoscaling.slo.objective": (
        {**SCALED, "autoscaling__slo__ttft": "1s"},
        {"autoscaling__slo__objective": 99.9},
    ),
    "autoscaling.slo.percentile": ({**SCALED, "autoscaling__slo__ttft": "1s"}, {"autoscaling__slo__percentile": 90}),
    "autoscaling.scaleToZeroAfter": (SCALED, {"autoscaling__scaleToZeroAfter": "9m"}),
    **{
        f"autoscaling.behavior.{side}.{name}": (SCALED, {f"autoscaling__behavior__{side}": {name.split(".")[0]: value}})
        for side in ("scaleUp", "scaleDown")
        for name, value in {
            "stabilizationWindowSeconds": 7,
            "selectPolicy": "Min",
            "policies.type": [RULE],
            "policies.value": [RULE],
            "policies.periodSeconds": [RULE],
        }.items()
    },
    "routing.policy": ({}, {"routing__policy": "RoundRobin"}),
    "routing.weight": ({}, {"routing__weight": 5}),
    "routing.sessionHeader": ({}, {"routing__sessionHeader": "x-session"}),
    "routing.queue.maxRequests": ({}, {"routing__queue__maxRequests": 5}),
    "routing.queue.maxBytes": ({}, {"routing__queue__maxBytes": "1Mi"}),
    "routing.queue.timeout": ({}, {"routing__queue__timeout": "5s"}),
    "rollout.strategy": ({}, {"rollout__strategy": "Replace"}),
    "rollout.maxSurge": ({}, {"rollout__maxSurge": 2}),
    "rollout.maxUnavailable": ({}, {"rollout__maxUnavailable": 1}),
    "rollout.drainTimeout": ({}, {"rollout__drainTimeout": "5s"}),
    "template.metadata.labels": ({}, {"template__metadata__labels": {"a": "b"}}),
    "template.metadata.annotations": ({}, {"template__metadata__annotations": {"a": "b"}}),
    "template.spec": ({}, {"template__spec__nodeSelector": {"a": "b"}}),
    "cost.hour": ({}, {"cost__hour": 2.0}),
    "cost.gpuHour": ({"resources__gpus": 1}, {"cost__gpuHour": 2.0}),
}
"""Field -> (changes before, changes that set the field to another value)."""

IGNORED_TOGETHER: list[tuple[dict[str, Any], str, str]] = [
    ({"engine__image": "x:1", "engine__version": "1.0.0"}, "spec.engine.version", "into its tag"),
    ({"cost__gpuHour": 2.0}, "spec.cost.gpuHour", "set spec.resources.gpus"),
    (
        {"routing__sessionHeader": "x-session", "routing__policy": "RoundRobin"},
        "spec.routing.sessionHeader",
        "set spec.routing.policy to Auto",
    ),
    (
        {**SCALED, "autoscaling__warm": 1, "autoscaling__mode": "Advisory"},
        "spec.autoscaling.warm",
        "set mode to Active",
    ),
    (
        {**SCALED, "autoscaling__slo__ttft": "1s", "autoscaling__policy": "TargetTracking"},
        "spec.autoscaling.slo",
        "set policy to Demand",
    ),
    (
        {
            "model__source": "s3://bucket/prefix",
            "model__cache__size": "1Gi",
            "model__credentialsSecretRef": {"name": "s", "key": "token"},
        },
        "spec.model.credentialsSecretRef.key",
        "AWS_ACCESS_KEY_ID",
    ),
    (
        {"engine__extraArgs": ["--seed=1", "--cuda-graphs=false"]},
        "spec.engine.extraArgs[1]",
        "spec.resources.gpus to 1",
    ),
    ({"engine__extraArgs": ["--vocab-size=99"]}, "spec.engine.extraArgs[0]", "--null-runner"),
    ({"engine__extraArgs": ["--step-time={}"]}, "spec.engine.extraArgs[0]", "--null-runner"),
    ({"engine__speculative__method": "eagle3"}, "spec.engine.speculative", "name it by source, or set method to auto"),
]


def leaves(section: type[Section], path: str = "") -> Iterator[str]:
    """Yield the dotted paths of all fields that contain no further section."""
    for name, field in section.model_fields.items():
        here, inner = f"{path}{field.alias or name}", _section_in(field.annotation)
        yield from leaves(inner, f"{here}.") if inner else [here]


def _section_in(kind: Any) -> type[Section] | None:
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind
    return next((found for each in get_args(kind) if (found := _section_in(each))), None)


def acted_on(plan: Plan, backend: Backend) -> Any:
    """Return what the backend reads of a plan: all of it in a cluster; on a machine what its processes get."""
    plan = replace(plan, problems=(), notes=(), ignored=())
    if backend == "kubernetes":
        context = RenderContext(namespace="pagemill-system", engine_image="engine:1", tokens=("t",), loader_done=True)
        return plan, render_children(plan, Owner(plan.namespace, plan.name, "uid"), context)
    group = plan.groups[0]
    process = replace(group.process, memory_bytes=None, gpu_product=None, environment_from={}, cpu_cores=None)
    group = replace(group, process=process, digest="", image=None, version=None, template={})
    return replace(plan, groups=(group,), cache=None, credentials=None)


def test_every_field_has_a_case() -> None:
    assert sorted(leaves(LLMDeploymentSpec)) == sorted(CASES)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("field", CASES)
def test_a_field_has_an_effect_or_is_refused_or_reported(deployment: Make, backend: Backend, field: str) -> None:
    before, changes = CASES[field]
    plain, changed = (make_plan(deployment(**each), backend) for each in (before, before | changes))
    named = [problem.field.removeprefix("spec.") for problem in (*changed.problems, *changed.ignored)]
    is_named = any(field.startswith(each.partition("[")[0]) for each in named)
    assert is_named or acted_on(plain, backend) != acted_on(changed, backend), field
    assert all(len(problem.message) > 20 for problem in (*changed.problems, *changed.ignored))


@pytest.mark.parametrize(("changes", "field", "remedy"), IGNORED_TOGETHER)
def test_a_field_without_effect_beside_others_is_reported_with_value_and_remedy(
    deployment: Make, changes: dict[str, Any], field: str, remedy: str
) -> None:
    plan = make_plan(deployment(**changes), "kubernetes")
    (ignored,) = plan.ignored
    assert (ignored.field, plan.problems) == (field, ())
    finding = fields_supported(plan)
    assert (finding.status, finding.reason) == ("False", "FieldNotSupported")
    assert finding.message.startswith(f"{field} {ignored.value!r} has no effect: ")
    assert remedy in finding.message


def test_a_method_that_a_package_may_have_goes_to_the_engine(deployment: Make) -> None:
    planned = make_plan(deployment(engine__speculative={"method": "lookup.of-a-package"}))
    assert planned.ignored == ()
    assert planned.groups[0].process.settings["engine"]["speculative"]["method"] == "lookup.of-a-package"


def test_arguments_with_an_effect_are_not_reported(deployment: Make) -> None:
    on_gpu = make_plan(deployment(resources__gpus=1, engine__extraArgs=["--cuda-graphs=false"]))
    simulated = make_plan(deployment(engine__extraArgs=["--null-runner", "--vocab-size=99", "--step-time={}"]))
    assert (on_gpu.ignored, simulated.ignored) == ((), ())


def test_settings_of_a_cluster_are_ignored_on_a_machine_by_name(deployment: Make) -> None:
    changes = {"engine__image": "x:1", "resources__memory": "2Gi", "template__spec__nodeSelector": {"a": "b"}}
    changes |= {"template__spec__tolerations": []}
    local, cluster = (make_plan(deployment(**changes), each) for each in BACKENDS)
    assert {each.field: each.value for each in local.ignored} == {
        "spec.engine.image": "x:1",
        "spec.resources.memory": "2Gi",
        "spec.template.spec": "nodeSelector, tolerations",
    }
    assert cluster.ignored == ()
    assert local.groups[0].digest == cluster.groups[0].digest


def test_an_external_autoscaler_is_ignored_on_a_machine_and_not_in_a_cluster(deployment: Make) -> None:
    external = deployment(autoscaling={"mode": "External", "maxReplicas": 2})
    assert [each.field for each in make_plan(external, "local").ignored] == ["spec.autoscaling.mode"]
    assert make_plan(external, "kubernetes").ignored == ()


def test_a_field_without_effect_is_an_event_and_does_not_keep_replicas_from_being_ready(deployment: Make) -> None:
    plain, ignoring = (make_plan(deployment(**each)) for each in ({}, {"engine__speculative__method": "eagle3"}))
    assert fields_supported(plain)[1:3] == ("True", "AllFieldsSupported")
    assert fields_supported(None)[1:3] == ("Unknown", "NotPlanned")
    ready = [{each.type: each for each in find_conditions(Observation(plan))}["Ready"] for plan in (plain, ignoring)]
    assert ready[0] == ready[1]
    statuses = [
        {"conditions": [each._asdict() for each in find_conditions(Observation(plan))]} for plan in (plain, ignoring)
    ]
    (event,) = events_between(*statuses)
    assert (event.type, event.reason) == ("Warning", "FieldNotSupported")


def fields_supported(plan: Plan | None) -> Finding:
    found = {finding.type: finding for finding in find_conditions(Observation(plan))}
    return found["FieldsSupported"]
