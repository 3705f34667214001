"""The arithmetic of well-known articles on memory of LLaMA models, computed by the functions of `pagemill plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from outlines import write_outline

from pagemill.planning.accelerators import find_accelerator
from pagemill.planning.headers import header_of
from pagemill.planning.placement import GpuPlacement, place
from pagemill_engine.config import EngineConfig
from pagemill_execution.sizing.budget import GPU_SHARE

GIB = 1024**3
LLAMA_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "float16",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
LLAMA_13B = {
    **LLAMA_7B,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_outline(folder / name, each) for name, each in (("7B", LLAMA_7B), ("13B", LLAMA_13B))}


def placed(folder: Path, memory_bytes: int, **settings: Any) -> GpuPlacement:
    accelerator = find_accelerator("a100-80gb")
    assert accelerator is not None
    with header_of(str(folder), "--model") as header:
        config = EngineConfig(model=str(folder), dtype="float16", **settings)
        return place(accelerator._replace(memory_bytes=memory_bytes), config, header)


def num_tokens(found: GpuPlacement) -> int:
    return found.memory.num_blocks * found.config.block_size


def test_a_model_of_7b_and_33_users_fill_80_gb(folders: dict[str, Path]) -> None:
    found = placed(folders["7B"], 80 * GIB)
    assert found.sizes.weight_bytes / 1e9 == pytest.approx(14, rel=0.04)
    request_bytes = 4096 * found.sizes.kv_bytes_per_token
    assert request_bytes == 2 * GIB
    assert (80 * GIB - found.sizes.weight_bytes) // request_bytes == 33
    # An engine leaves a tenth of the device to others, and needs room for its largest step.
    left = int(80 * GIB * GPU_SHARE) - found.sizes.weight_bytes - found.memory.budget.activation_bytes
    assert num_tokens(found) // 4096 == left // request_bytes == 29


def test_a_sequence_of_13b_takes_1_7_gb_and_40_gb_hold_14k_tokens(folders: dict[str, Path]) -> None:
    found = placed(folders["13B"], 40 * GIB)
    assert found.sizes.weight_bytes / 1e9 == pytest.approx(26, rel=0.01)
    assert 2048 * found.sizes.kv_bytes_per_token / 1e9 == pytest.approx(1.7, rel=0.02)
    assert num_tokens(found) // 1000 == 14


@pytest.mark.parametrize(
    ("settings", "weight_gb", "token_bytes", "at_once"),
    [
        ({}, 13.5, 2**19, 29),
        ({"quantization": "int4"}, 5.2, 2**19, 61),
        ({"kv_cache_dtype": "int8"}, 13.5, 2**18 * 33 // 32, 57),  # a scale for each head of 128 values
        ({"quantization": "int4", "kv_cache_dtype": "int8"}, 5.2, 2**18 * 33 // 32, 119),
    ],
)
def test_how_many_of_100_users_of_7b_run_at_once_on_24_gb(
    folders: dict[str, Path], settings: dict[str, str], weight_gb: float, token_bytes: int, at_once: int
) -> None:
    """Each has 500 tokens. Only with 4 bits and an int8 cache do all 100 fit."""
    found = placed(folders["7B"], int(24e9), **settings)
    assert found.sizes.weight_bytes / 1e9 == pytest.approx(weight_gb, rel=0.01)
    assert found.sizes.kv_bytes_per_token == token_bytes
    step_bytes = found.memory.budget.activation_bytes
    assert step_bytes < 0.3e9
    by_hand = (0.9 * 24e9 - found.sizes.weight_bytes - step_bytes) / token_bytes
    assert num_tokens(found) == pytest.approx(by_hand, abs=16)
    assert num_tokens(found) // 500 == at_once
