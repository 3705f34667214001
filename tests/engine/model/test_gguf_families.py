"""GGUF files of dense families give the answers and log probabilities of the safetensors folder with equal weights.

The `gguf` package provides llama.cpp's file names, keys and orders of rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import family_gguf
import pytest
from expert_models import DEEPSEEK_V2
from family_checkpoints import KINDS, NUM_HEADS, SIZE, write_checkpoint
from family_gguf import write_family_gguf
from family_models import MODELS, write_model
from gguf_files import BEYOND, FILES, SAME_MAGNITUDE, assert_equal_answers
from safetensors.torch import load_file, save_file

from pagemill_execution.weights.errors import LoadError
from pagemill_models.families import baichuan, gemma2
from pagemill_models.spec.model_files import load_model_spec

Loader = Callable[..., Any]
Drivers = Callable[[Any], Any]
IN_FULL = (
    "ernie4_5-moe", "gemma4 of one kind of value", "hunyuan-moe", "minimax-m2", "mistral4", "deepseek2, GLM-4.7-Flash",
)  # fmt: skip
"""Files whose changes of tensors others have, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in IN_FULL else name for name in FILES]
)
def test_a_gguf_file_gives_the_answers_of_a_folder_with_equal_weights(
    name: str, tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    architecture, model = FILES[name]
    write_model(*model, tmp_path)
    write_family_gguf(tmp_path / "model.gguf", tmp_path, architecture)
    assert_equal_answers(tmp_path, tmp_path / "model.gguf", runner_loader, make_driver)


@pytest.mark.parametrize("name", BEYOND)
def test_gguf_files_of_families_beyond_transformers_give_the_answers_of_their_folders(
    name: str, tmp_path: Path, runner_loader: Loader, make_driver: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    monkeypatch.setattr(baichuan, "SIZES_OF_13B" if kind.alibi else "SIZES_OF_7B", (SIZE, NUM_HEADS))
    write_checkpoint(kind, tmp_path)
    write_family_gguf(tmp_path / "model.gguf", tmp_path, BEYOND[name])
    assert_equal_answers(tmp_path, tmp_path / "model.gguf", runner_loader, make_driver)


@pytest.mark.parametrize("name", ["granite", "bloom", "falcon 40b", "gemma"])
def test_planted_faults_in_the_order_of_rows_and_in_offsets_are_detected(
    name: str, tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    architecture, model = FILES[name]
    write_model(*model, tmp_path)
    write_family_gguf(tmp_path / "model.gguf", tmp_path, architecture)
    weights = load_file(tmp_path / "model.safetensors")
    part = "norm.weight" if name == "gemma" else "q_proj.weight" if name == "granite" else "query_key_value.weight"
    for each, tensor in weights.items():
        if each.endswith(part):
            weights[each] = tensor + 1 if tensor.dim() == 1 else tensor.roll(2, 0)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AssertionError):
        assert_equal_answers(tmp_path, tmp_path / "model.gguf", runner_loader, make_driver)


def test_gemma_2_27b_has_its_own_scale_of_scores(
    tmp_path: Path, runner_loader: Loader, make_driver: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, shape = MODELS["gemma2"]
    monkeypatch.setattr(gemma2, "LAYERS_OF_27B", shape["num_hidden_layers"])
    write_model(name, {**shape, "query_pre_attn_scalar": 16}, tmp_path)
    write_family_gguf(tmp_path / "model.gguf", tmp_path, "gemma2")
    assert_equal_answers(tmp_path, tmp_path / "model.gguf", runner_loader, make_driver)


def test_a_gemma_2_file_without_a_window_gets_the_published_one(tmp_path: Path) -> None:
    name, shape = MODELS["gemma2"]
    write_model(name, {**shape, "sliding_window": None}, tmp_path)
    write_family_gguf(tmp_path / "model.gguf", tmp_path, "gemma2")
    assert load_model_spec(tmp_path / "model.gguf").decoder.windows() == {4096, None}


def test_the_layers_with_a_window_are_those_that_a_file_lists(tmp_path: Path) -> None:
    architecture, model = FILES["exaone4"]
    write_model(*model, tmp_path)
    windowed = [True, False, False, True]
    write_family_gguf(tmp_path / "model.gguf", tmp_path, architecture, **{"attention.sliding_window_pattern": windowed})
    decoder = load_model_spec(tmp_path / "model.gguf").decoder
    assert [attention.window is not None for attention in decoder.attentions()] == windowed


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("exaone4", {"attention.sliding_window_pattern": [True]}, "a list of 4 names"),
        ("glm4moe", {"expert_gating_func": 1}, "experts that are not chosen by sigmoids"),
        ("mistral4", {"expert_gating_func": 2}, "experts that are not chosen by a softmax"),
        ("mpt", {"attention.max_alibi_bias": 0.0}, "`attn_config.alibi` = False"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, r"`lfm2.attention.head_count_kv` is .*; it must be a list of 4"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 0, 1]}, "it must be one number for the layers with attention"),
        ("lfm2moe", {"expert_gating_func": 1}, "experts that are not chosen by sigmoids"),
    ],
)
def test_unsupported_variants_are_refused(
    name: str, metadata: dict[str, Any], message: str, tmp_path: Path, runner_loader: Loader
) -> None:
    architecture, model = FILES[name]
    write_model(*model, tmp_path)
    write_family_gguf(tmp_path / "model.gguf", tmp_path, architecture, **metadata)
    with pytest.raises(LoadError, match=message):
        runner_loader(tmp_path / "model.gguf")


@pytest.mark.parametrize("header", ["config.json", "metadata"])
def test_a_baichuan_of_unknown_size_is_refused_if_nothing_says_whether_it_has_rotary_embeddings(
    header: str, tmp_path: Path, runner_loader: Loader
) -> None:
    write_checkpoint(KINDS["baichuan 13b"], tmp_path)
    write_family_gguf(tmp_path / "model.gguf", tmp_path, "baichuan")
    with pytest.raises(LoadError, match=r"a hidden size of 64 and 4 heads.*neither 7B.*nor 13B"):
        runner_loader(tmp_path if header == "config.json" else tmp_path / "model.gguf")


@pytest.mark.parametrize(("size", "heads", "is_rotated"), [(4096, 32, True), (5120, 40, False)])
@pytest.mark.parametrize("has_key", [True, False])
def test_the_size_of_a_baichuan_determines_whether_it_has_rotary_embeddings(
    size: int, heads: int, is_rotated: bool, has_key: bool, tmp_path: Path
) -> None:
    from pagemill_models.spec.decoders import decoder_from_config

    config = {
        "architectures": ["BaichuanForCausalLM"],
        "hidden_size": size,
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 100,
        "model_max_length": 4096,
        **({"max_position_embeddings": 4096} if has_key else {}),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    attention = next(decoder_from_config(config, tmp_path / "config.json").attentions())
    assert (attention.rope is not None) is is_rotated
    assert (attention.alibi_slopes is None) is is_rotated


def test_deepseek_files_with_whole_key_and_value_matrices_are_read(
    tmp_path: Path, runner_loader: Loader, make_driver: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converters stored them like this before they split `kv_b_proj`."""
    monkeypatch.setattr(family_gguf, "_latent", lambda name, tensor, config: {name: tensor})
    keys = family_gguf._deepseek2
    sizes = {"attention.key_length": 16 + 8, "attention.value_length": 12}
    old = lambda config: {key: value for key, value in keys(config).items() if not key.endswith("_mla")} | sizes  # noqa: E731
    monkeypatch.setattr(family_gguf, "_deepseek2", old)
    write_model("DeepseekV2ForCausalLM", DEEPSEEK_V2 | SAME_MAGNITUDE, tmp_path)
    write_family_gguf(tmp_path / "model.gguf", tmp_path, "deepseek2")
    assert_equal_answers(tmp_path, tmp_path / "model.gguf", runner_loader, make_driver)
