"""GGUF files of hybrids give the answers of folders with equal weights, whatever converters did to their tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import hybrid_gguf
import numpy as np
import pytest
import torch
from cut_weights import Uncut, same, stored_form
from family_gguf import write_family_gguf
from gguf_files import HYBRID_FILES, PROMPTS, assert_equal_answers
from hybrid_models import QWEN, write_hybrid
from safetensors.torch import load_file, save_file

from pagemill_engine.config import EngineConfig
from pagemill_execution.sizing.rank_parts import part_of
from pagemill_execution.sizing.sizing import weights_of
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.gguf_weights import GGUFWeights
from pagemill_models.spec.model_files import load_model_spec
from pagemill_protocol.source_errors import SourceError

Loader = Callable[..., Any]
Drivers = Callable[[Any], Any]
NUM_TOKENS = 8
SHORT = ("qwen35", "qwen3next", "granitehybrid", "falcon-h1", "nemotron_h_moe", "kimi-linear")
"""Of each kind of state and of change, one shape in every run."""


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in HYBRID_FILES]
)
def test_a_gguf_file_of_a_hybrid_gives_the_answers_of_its_folder(
    name: str, tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    architecture, model = HYBRID_FILES[name]
    write_hybrid(*model, tmp_path)
    write_family_gguf(tmp_path / "model.gguf", tmp_path, architecture)
    assert_equal_answers(tmp_path, tmp_path / "model.gguf", runner_loader, make_driver)


WIDE = {
    **QWEN,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "head_dim": 64,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
}
"""A shape whose matrices all types can store: a block of 256 has several value heads."""
IN_RULE = {
    "in_proj_qkv": ("attn_qkv", 0),
    "in_proj_z": ("attn_gate", 0),
    "out_proj": ("ssm_out", 1),
}


GONE = ("model.layers.0.linear_attn.A_log", "model.layers.1.linear_attn.conv1d.weight")


def stored(tensor: torch.Tensor, dimension: int, config: dict[str, Any], kind: str) -> Any:
    """Return what a file of that type has of the tensor, in Hugging Face's order."""
    storage = gguf.GGMLQuantizationType[kind]
    order = hybrid_gguf.tiled(torch.arange(tensor.shape[dimension]), 0, config, whole=True)
    moved = tensor.index_select(dimension, order).contiguous().numpy()
    values = gguf.quants.dequantize(gguf.quants.quantize(moved, storage), storage).reshape(moved.shape)
    return np.take(values, order.argsort().numpy(), dimension)


@pytest.mark.parametrize(
    "kind", ["Q8_0", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("Q4_1", "BF16", "Q5_0"))]
)
@pytest.mark.parametrize("size", [32, 12])
def test_quantized_matrices_of_delta_rules_are_read_in_the_order_of_folders(
    kind: str, size: int, tmp_path: Path
) -> None:
    """Heads of 12 values are no whole groups of codes: as columns they are read as floats."""
    overrides = {**WIDE, "linear_value_head_dim": size}
    config = write_hybrid("Qwen3_5ForCausalLM", overrides, tmp_path).config.to_dict()
    kinds = {f"blk.0.{short}.weight": kind for short, _ in IN_RULE.values()}
    write_family_gguf(tmp_path / "model.gguf", tmp_path, "qwen35", matrices=kinds)
    weights, folder = GGUFWeights(tmp_path / "model.gguf"), load_file(tmp_path / "model.safetensors")
    for name, (_, dimension) in IN_RULE.items():
        whole = f"model.layers.0.linear_attn.{name}.weight"
        expected = stored(folder[whole], dimension, config, kind)
        found = np.empty(expected.shape, dtype=np.float32)
        weights.read_into(whole, found)
        np.testing.assert_array_equal(found, expected)
        codes, blocks = weights.read_codes(whole), weights.read_blocks(whole)
        kept = kind != "BF16" and (dimension == 0 or size == 32)
        assert (codes is not None) == kept
        assert (blocks is not None) == (kept and kind != "Q5_0")
        assert codes is None or np.allclose(codes.dequantize(), expected, rtol=0, atol=1e-7)
        if blocks is not None:
            data = blocks.data.reshape(len(expected), -1)
            storage = gguf.GGMLQuantizationType[kind]
            np.testing.assert_array_equal(gguf.quants.dequantize(data, storage).reshape(expected.shape), expected)


def test_a_quantized_file_gives_the_answers_of_its_values(
    tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    write_hybrid("Qwen3_5ForCausalLM", WIDE, tmp_path)
    parts = ("attn_qkv", "attn_gate", "ssm_out", "attn_q", "attn_output", "ffn_up", "ffn_gate", "ffn_down")
    kinds = {f"blk.{layer}.{part}.weight": "Q8_0" for part in parts for layer in range(2)}
    write_family_gguf(tmp_path / "model.gguf", tmp_path, "qwen35", matrices=kinds)
    weights, path = GGUFWeights(tmp_path / "model.gguf"), tmp_path / "model.safetensors"
    folder = load_file(path)
    for name, tensor in folder.items():
        if "norm" not in name:
            weights.read_into(name, tensor.numpy())
    save_file(folder, path, {"format": "pt"})
    expected, found = (
        make_driver(runner_loader(each)).greedy(PROMPTS, NUM_TOKENS) for each in (tmp_path, tmp_path / "model.gguf")
    )
    for here, there in zip(found, expected, strict=True):
        assert here.token_ids[0] == there.token_ids[0]
        assert here.logprobs[0] == pytest.approx(there.logprobs[0], abs=0.05)


def test_ranks_read_their_value_heads_of_a_file(tmp_path: Path) -> None:
    overrides = {**WIDE, "linear_num_key_heads": 4}
    write_hybrid("Qwen3_5ForCausalLM", overrides, tmp_path)
    kinds = {f"blk.0.{short}.weight": "Q8_0" for short, _ in IN_RULE.values()}
    path = tmp_path / "model.gguf"
    write_family_gguf(path, tmp_path, "qwen35", matrices=kinds)
    spec = load_model_spec(path)
    whole = weights_of(EngineConfig(model=str(path)), path, spec, True)
    for rank in range(2):
        part = part_of(spec, rank, 2, [(0, spec.num_layers)])
        own, expected = part.weights(whole, spec.decoder), part.weights(Uncut(whole), spec.decoder)  # type: ignore[arg-type]
        assert own.shapes == expected.shapes
        for each in part.spec.decoder.shapes():
            assert same(stored_form(own, each), stored_form(expected, each)), each


@pytest.mark.sample("order of heads", "logarithm")
@pytest.mark.parametrize("fault", ["order of heads", "logarithm", "gates", "norms"])
def test_planted_faults_of_what_converters_change_are_detected(
    fault: str, tmp_path: Path, runner_loader: Loader, make_driver: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted: dict[str, tuple[str, Any]] = {
        "order of heads": ("tiled", lambda tensor, dimension, config, whole: tensor),
        "logarithm": ("_of_rule", lambda name, tensor: _of_rule(name, tensor * 1.05 if "A_log" in name else tensor)),
    }
    _of_rule = hybrid_gguf._of_rule
    architecture, model = HYBRID_FILES["qwen35"]
    write_hybrid(*model, tmp_path)
    if fault in planted:
        monkeypatch.setattr(hybrid_gguf, *planted[fault])
    write_family_gguf(tmp_path / "model.gguf", tmp_path, architecture)
    if fault not in planted:
        part = "q_proj.weight" if fault == "gates" else "input_layernorm.weight"
        weights = load_file(tmp_path / "model.safetensors")
        changed = {name: tensor.roll(32, 0) if name.endswith(part) else tensor for name, tensor in weights.items()}
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError):
        assert_equal_answers(tmp_path, tmp_path / "model.gguf", runner_loader, make_driver)


def test_missing_tensors_are_named(tmp_path: Path, runner_loader: Loader) -> None:
    architecture, model = HYBRID_FILES["qwen35"]
    write_hybrid(*model, tmp_path)
    path = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if name not in GONE}
    save_file(kept, path, {"format": "pt"})
    write_family_gguf(tmp_path / "model.gguf", tmp_path, architecture)
    with pytest.raises(LoadError, match=r"missing: `model.layers.0.*A_log`, `model.layers.1.*conv1d.weight`"):
        runner_loader(tmp_path / "model.gguf")


def test_rates_that_would_grow_are_refused_by_the_tensor(
    tmp_path: Path, runner_loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, model = HYBRID_FILES["qwen35"]
    write_hybrid(*model, tmp_path)
    of_rule = hybrid_gguf._of_rule
    monkeypatch.setattr(
        hybrid_gguf,
        "_of_rule",
        lambda name, tensor: {each: value.abs() for each, value in of_rule(name, tensor).items()},
    )
    write_family_gguf(tmp_path / "model.gguf", tmp_path, architecture)
    with pytest.raises(LoadError, match=r"tensor `blk.0.ssm_a` holds .*; its values must be 0 or less"):
        runner_loader(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("qwen35", {"ssm.time_step_rank": 5}, "`qwen35.ssm.time_step_rank` is 5; it must be a divisor of the 72"),
        ("qwen35", {"ssm.group_count": 4}, "linear_num_value_heads. is '6'; it must be a multiple of the 4"),
        ("qwen35", {"nextn_predict_layers": 4}, "at least 0 and less than the 4 layers"),
        ("bamba", {"attention.head_count_kv": [0, 2, 1, 0]}, "it must be one number for the layers with attention"),
        ("kimi-linear", {"expert_gating_func": 1}, "experts that are not chosen by sigmoids"),
        ("nemotron_h", {"feed_forward_length": [96]}, "it must be a list of 4 integers"),
    ],
)
def test_wrong_metadata_is_refused_by_its_key(
    name: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    architecture, model = HYBRID_FILES[name]
    write_hybrid(*model, tmp_path)
    write_family_gguf(tmp_path / "model.gguf", tmp_path, architecture, **metadata)
    with pytest.raises(SourceError, match=message):
        load_model_spec(tmp_path / "model.gguf")
