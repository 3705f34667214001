"""What adapters have beside A and B, copies of the base's matrices, and ranks above the sizes of a matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_engine import NUM_TOKENS, Engine
from family_gguf import write_family_gguf
from peft_adapters import PROMPTS, Base, write_adapter, write_base
from safetensors.numpy import load_file, save_file

from pagemill_models.adapters.errors import AdapterError

WEIGHTS = "adapter_model.safetensors"
TARGETS = ["embed_tokens", "v_proj"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return write_base("llama", tmp_path_factory.mktemp("base"))


def change(folder: Path, name: str, by: float) -> None:
    """Change one value of a tensor."""
    tensors = load_file(folder / WEIGHTS)
    tensors[name][5, 5] += by
    save_file(tensors, folder / WEIGHTS)


def refusal(engine: Engine, folder: Path) -> str:
    with pytest.raises(AdapterError, match="save_embedding_layers=False") as refused:
        engine.load(folder)
    return refused.value.message


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens", "layers.1.mlp.up_proj"])
def test_a_module_that_was_saved_and_not_trained_is_served(module: str, llama: Base, tmp_path: Path) -> None:
    adapted = write_adapter(llama, tmp_path, target_modules=["q_proj"], modules_to_save=[module])
    (name,) = [name for name in load_file(tmp_path / WEIGHTS) if "lora_" not in name]
    engine = Engine(llama.folder)
    expected, gap = adapted.greedy(PROMPTS[0], NUM_TOKENS)
    assert gap > 1e-3, "near ties do not show what is wrong"
    assert engine.greedy(PROMPTS[:1], [engine.load(tmp_path)]) == [expected]
    change(tmp_path, name, 0.5)
    assert name in refusal(engine, tmp_path)


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q5_1", 5), ("Q4_0", 4)])
def test_a_copy_beside_a_quantized_base_may_differ_by_its_rounding(
    kind: str, bits: int, llama: Base, tmp_path: Path
) -> None:
    """The trainer had the values from which the file was quantized."""
    write_family_gguf(tmp_path / "model.gguf", llama.folder, "llama", embedding=kind)
    write_adapter(llama, tmp_path, target_modules=TARGETS)
    (name,) = [name for name in load_file(tmp_path / WEIGHTS) if name.endswith("base_layer.weight")]
    engine = Engine(tmp_path / "model.gguf")
    assert np.abs(np.subtract(engine.scores(PROMPTS[0], engine.load(tmp_path)), engine.scores(PROMPTS[0], ""))).max()
    largest = float(np.abs(load_file(tmp_path / WEIGHTS)[name][5]).max())
    change(tmp_path, name, 3 * 2.0 ** (1 - bits) * largest)
    assert name in refusal(engine, tmp_path)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_copy_is_compared_with_the_files_of_a_base_that_the_engine_quantizes(
    quantization: str, llama: Base, tmp_path: Path
) -> None:
    write_adapter(llama, tmp_path, target_modules=TARGETS)
    (name,) = [name for name in load_file(tmp_path / WEIGHTS) if name.endswith("base_layer.weight")]
    engine = Engine(llama.folder, quantization=quantization)
    engine.load(tmp_path)
    change(tmp_path, name, 0.05)
    assert name in refusal(engine, tmp_path)


def test_positions_of_an_embedding_are_refused_by_name(tmp_path: Path) -> None:
    base = write_base("gpt2", tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", target_modules=["wpe", "c_attn"], fan_in_fan_out=True)
    with pytest.raises(AdapterError, match=r"wpe.*lora_embedding_A"):
        Engine(base.folder).load(tmp_path / "adapter")


@pytest.mark.parametrize("rank", [96, 512])
def test_ranks_above_the_sizes_of_a_matrix_are_computed(rank: int, llama: Base, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "down_proj", "lm_head"]}
    adapted = write_adapter(llama, tmp_path, size=0.03, **settings)
    expected, gap = adapted.greedy(PROMPTS[0], NUM_TOKENS)
    assert gap > 1e-3, "near ties do not show what is wrong"
    engine = Engine(llama.folder, max_lora_rank=rank)
    digest = engine.load(tmp_path)
    assert engine.greedy(PROMPTS[:2], [digest, ""])[0] == expected
    assert engine.greedy(PROMPTS[:1], [""]) != [expected]
