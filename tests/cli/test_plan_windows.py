"""Plans and simulations count what requests hold: of models with windows, more of them fit into the same memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from family_models import GEMMA3, write_model
from hybrid_models import QWEN
from typer.testing import CliRunner

from pagemill.main import app
from pagemill.planning.choosing import load_one
from pagemill.planning.replica import ReplicaOptions, engine_config, replica_of
from pagemill.simulation.fleet import FleetOptions, bounds_of, fleet_of
from pagemill_engine.config import EngineConfig
from pagemill_execution.sizing.kv_sizes import CacheBlocks, cache_kinds
from pagemill_kernels.kv_store.kinds import KVType
from pagemill_models.spec.model_files import load_model_spec
from pagemill_operator.autoscaler.settings import Slo
from pagemill_protocol.report.cache_kinds import blocks_at
from pagemill_protocol.report.state import StepTimeParams
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.pod import SimulatedPod

LONGEST = 8192


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "gemma3"
    write_model("Gemma3ForCausalLM", {**GEMMA3, "sliding_window": 64, "max_position_embeddings": LONGEST}, folder)
    return folder


def write_fit(folder: Path) -> Path:
    fit = folder / "fit.json"
    fit.write_bytes(msgspec.json.encode(StepTimeParams(knots_tokens=[1, 8192], knot_ms=[1.0, 100.0])))
    return fit


def replica(model: Path, tmp_path: Path, input_tokens: int, *options: str) -> dict[str, Any]:
    """Return a planned replica; latencies of partly cached prompts are not simulated."""
    fit = write_fit(tmp_path)
    lengths = ["--input", input_tokens, "--output", 100, "--cached", 1]
    words = ["plan", "--model", model, "--fit", fit, "--rps", 1, *lengths, *options, "-o", "json"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)["replica"]
    return found


@pytest.mark.parametrize("options", [(), ("--accelerator", "l4")], ids=["cpu", "gpu"])
def test_more_long_requests_fit_behind_windows(model: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    planned = replica(model, tmp_path, 4000, *options)
    num_blocks = planned["memory"]["kv_bytes"] // (planned["kvBytesPerToken"] * 16)
    config = EngineConfig(model="m", max_num_batched_tokens=planned["maxNumBatchedTokens"])
    cache = cache_kinds(config, load_model_spec(model), "float32", num_blocks)
    assert [kind.window for kind in cache.kinds] == [None, 64]
    assert planned["numBlocks"] == blocks_at(cache.kinds, cache.counts, 4100, 16) > 3 * num_blocks
    assert planned["maxModelLen"] == LONGEST
    assert planned["longestRequestsAtOnce"] >= min(planned["maxNumSeqs"], 3 * num_blocks * 16 // LONGEST)


def test_short_requests_hold_as_much_as_without_windows(model: Path, tmp_path: Path) -> None:
    planned = replica(model, tmp_path, 10)
    num_blocks = planned["memory"]["kv_bytes"] // (planned["kvBytesPerToken"] * 16)
    assert planned["numBlocks"] <= num_blocks


def test_a_plan_counts_the_states_of_recurrent_layers(tmp_path: Path) -> None:
    """With as many bytes of keys and values, states limit how many requests run; they are float32 in any cache."""
    folder = tmp_path / "hybrid"
    write_model("Qwen3_5ForCausalLM", {**QWEN, "max_position_embeddings": LONGEST, "dtype": "bfloat16"}, folder)
    planned = replica(folder, tmp_path, 100)
    config = EngineConfig(model="m", max_num_batched_tokens=planned["maxNumBatchedTokens"])
    num_blocks = planned["memory"]["kv_bytes"] // (planned["kvBytesPerToken"] * 16)
    value_bytes = planned["kvBytesPerToken"] / (2 * 2 * 32)  # bfloat16 where the processor multiplies it
    types: dict[float, KVType] = {2: "bfloat16", 4: "float32"}
    cache = cache_kinds(config, load_model_spec(folder), types[value_bytes], num_blocks)
    state = cache.kinds[-1]
    assert cache.most_proposed == 8
    tokens = 20544 + 8 * 4 * 3 * (2 * 8 + 6 * (12 + 1) + 2 * 2 * 8 + 6 * 12)
    assert planned["stateBytes"] == state.block_bytes + state.row_bytes == 9408 + tokens
    assert planned["numBlocks"] == blocks_at(cache.kinds, cache.counts, 200, 16)


def simulated_fleet(model: Path, tmp_path: Path, **engine: Any) -> FleetSettings:
    """Return the settings that `pagemill simulate` runs with."""
    loaded = load_one(None, None, str(model))
    loaded.plan.groups[0].process.settings["engine"].update(engine)
    options = ReplicaOptions(write_fit(tmp_path), None, None, 1.0, print)
    planned, fleet = replica_of(loaded.plan, options, 1000, 10), FleetOptions(1, 1, None, None, None)
    return fleet_of(
        loaded.plan, engine_config(loaded.plan, options), planned, bounds_of(loaded, fleet), Slo(), fleet, 0
    )


@pytest.mark.parametrize("name", ["windows", "states", "neither"])
def test_simulated_engines_have_the_cache_of_real_ones(model: Path, tmp_path: Path, name: str) -> None:
    hybrid, plain = tmp_path / "hybrid", tmp_path / "plain"
    write_model("Qwen3_5ForCausalLM", {**QWEN, "max_position_embeddings": LONGEST}, hybrid)
    write_model("Gemma3ForCausalLM", {**GEMMA3, "sliding_window": None, "max_position_embeddings": LONGEST}, plain)
    folder = {"windows": model, "states": hybrid, "neither": plain}[name]
    settings = simulated_fleet(folder, tmp_path, kv_cache_memory_bytes=50_000_000, dtype="float32")
    info = SimulatedPod("pod", settings.engine).core.runner.info
    config = msgspec.structs.replace(settings.engine, num_kv_blocks=None, max_model_len=None)
    real = CacheBlocks(info.kinds, info.blocks_of_kinds)
    if name == "neither":
        assert settings.engine.simulated_kinds is None
        assert [kind.keeps_all for kind in real.kinds] == [True]
        return
    assert [kind.name for kind in real.kinds] == {"windows": ["full", "window-64"], "states": ["full", "state"]}[name]
    assert info.shares_memory
    whole = sum(kind.block_bytes for kind in real.kinds if not kind.state)
    assert real[:2] == cache_kinds(config, load_model_spec(folder), "float32", 50_000_000 // whole)[:2]
    assert 0.9 * 50_000_000 < real.num_bytes <= 50_000_000
