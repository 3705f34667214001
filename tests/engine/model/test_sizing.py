"""The size of a model that is computed before loading equals its size in memory, on this machine and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from eagle_heads import SIZE, VOCAB, write_eagle3
from expert_models import MODELS as EXPERTS
from family_models import MODELS, write_model
from outlines import outline
from tiny_llama import write_tiny_llama

from pagemill_engine.config import EngineConfig
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.sizing.sizing import gpu_storage_forms, ranks_on_gpu, sizes_here, sizes_on_gpu
from pagemill_execution.starting.factory import create_runner
from pagemill_kernels.registry import ops_for
from pagemill_models.spec.model_files import load_model_spec, load_spec_without_weights

pytestmark = [pytest.mark.model]


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}, {"dtype": "float32"}], ids=str)
def test_the_computed_sizes_equal_those_of_the_engine(smollm2_path: Path, settings: dict[str, Any]) -> None:
    config = EngineConfig(model=str(smollm2_path), kv_cache_memory_bytes=8 * 1024**2, num_threads=1, **settings)
    sizes = sizes_here(config, smollm2_path, load_model_spec(smollm2_path))
    runner = create_runner(config, lambda phase, detail: None)
    try:
        assert runner.info.memory is not None
        assert sizes.kv_bytes_per_token == runner.info.kv_bytes_per_token
        # Packing pads matrices to whole tiles.
        assert sizes.weight_bytes == pytest.approx(runner.info.weight_bytes, rel=0.05)
    finally:
        runner.close()


def test_the_assumed_weight_formats_equal_those_of_the_triton_kernels() -> None:
    ops, holding = ops_for("triton"), gpu_storage_forms(EngineConfig(model="m"))
    assert holding.weights == ops.weight_forms


def test_on_a_gpu_floats_take_two_bytes_and_quantized_weights_stay_quantized(
    tmp_path: Path, smollm2_path: Path
) -> None:
    write_tiny_llama(tmp_path)
    spec = load_model_spec(tmp_path)
    config = EngineConfig(model=str(tmp_path))
    plain = sizes_on_gpu(config, tmp_path, spec)
    assert plain.weight_bytes == 2 * spec.num_parameters
    assert plain.kv_bytes_per_token == spec.kv_bytes_per_token(2)
    assert plain.item_bytes == torch.bfloat16.itemsize
    rounded = sizes_on_gpu(EngineConfig(model=str(tmp_path), quantization="int8"), tmp_path, spec)
    assert rounded.weight_bytes < 0.7 * plain.weight_bytes
    stored = load_model_spec(smollm2_path)
    codes = sizes_on_gpu(EngineConfig(model=str(smollm2_path)), smollm2_path, stored)
    assert codes.weight_bytes < 1.5 * stored.weight_bytes < 2 * stored.num_parameters


def test_the_first_of_several_gpus_has_what_drafts_whole(tmp_path: Path) -> None:
    """And beside a head without an embedding and logits of its own those of the model."""
    folder = tmp_path / "model"
    write_tiny_llama(
        folder, vocab_size=VOCAB, hidden_size=SIZE, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2
    )
    head = write_eagle3(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    spec, found = load_model_spec(folder), []
    for method, source in (("off", None), ("eagle3", str(head))):
        speculative = SpeculationConfig(method=method, source=source)
        config = EngineConfig(model=str(folder), speculative=speculative, tensor_parallel_size=2, max_model_len=64)
        ranks = [each.sizes for each in ranks_on_gpu(config, folder, spec)]
        found.append((sizes_on_gpu(msgspec.structs.replace(config, tensor_parallel_size=1), folder, spec), *ranks))
    (alone, plain, other), (drafting, first, same) = found
    assert same == other
    assert first.weight_bytes - plain.weight_bytes == drafting.weight_bytes - alone.weight_bytes + 4 * VOCAB * SIZE
    assert first.kv_bytes_per_token - plain.kv_bytes_per_token == drafting.draft_kv_bytes_per_token > 0


@pytest.mark.parametrize("name", [*MODELS, *EXPERTS])
def test_an_index_suffices_to_compute_a_models_size(name: str, tmp_path: Path) -> None:
    write_model(*{**MODELS, **EXPERTS}[name], tmp_path)
    spec, config = load_model_spec(tmp_path), EngineConfig(model=str(tmp_path))
    sizes = sizes_here(config, tmp_path, spec)
    outline(tmp_path)
    outlined = load_spec_without_weights(tmp_path)
    assert (outlined.num_parameters, outlined.decoder) == (spec.num_parameters, spec.decoder)
    assert sizes_here(config, tmp_path, outlined) == sizes
