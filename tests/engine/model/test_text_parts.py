"""The text part of multimodal models gives the greedy answers of transformers; what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from family_models import VOCAB_SIZE
from greedy_families import NUM_TOKENS, Family, family_of, tokens_of
from multimodal_models import MODELS, write_multimodal
from safetensors.torch import load_file, save_file

from pagemill_execution.weights.errors import LoadError
from pagemill_models.files.encoder_files import is_of_encoder
from pagemill_models.spec.model_files import load_model_spec

Loader = Callable[..., Any]
Drivers = Callable[[Any], Any]
LENGTHS = (1, 17, 33, 90)
SAMPLE = "Qwen3VLMoeForConditionalGeneration"
GEMMA = "Gemma3ForConditionalGeneration"
PUBLISHED = "language_model.model."


@pytest.mark.parametrize(
    "name", [name if name == SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in MODELS]
)
def test_text_gets_the_answers_of_transformers(
    name: str, tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    family = family_of(write_multimodal(name, tmp_path), tmp_path, VOCAB_SIZE, LENGTHS)
    assert family.median_gap > 0.3
    runner = runner_loader(tmp_path)
    driver = make_driver(runner)
    assert tokens_of(driver.greedy(family.prompts, NUM_TOKENS)) == family.expected
    chunked = driver.greedy(family.prompts, NUM_TOKENS, max_num_batched_tokens=13, enable_prefix_caching=False)
    assert tokens_of(chunked) == family.expected
    assert runner.info.compute.endswith(", text only")


def test_experts_stored_with_inputs_first_are_those_with_outputs_first(
    tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    """Published files of Qwen3-VL-MoE have the one, saved ones the other."""
    family = family_of(write_multimodal(SAMPLE, tmp_path), tmp_path, VOCAB_SIZE, LENGTHS[:2])
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {name: each.mT.contiguous() if ".experts." in name else each for name, each in tensors.items()}
    save_file(turned, tmp_path / "model.safetensors")
    assert tokens_of(make_driver(runner_loader(tmp_path)).greedy(family.prompts, NUM_TOKENS)) == family.expected


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp("gemma3")
    return family_of(write_multimodal(GEMMA, folder), folder, VOCAB_SIZE, LENGTHS[:2])


def renamed(folder: Path, copy: Path, prefix: str, config: dict[str, Any] | None = None) -> Path:
    """Copy a model of Gemma 3, with another prefix of its text's tensors and changed keys of its configuration."""
    tensors = load_file(folder / "model.safetensors")
    copy.mkdir()
    save_file({name.replace(PUBLISHED, prefix): tensor for name, tensor in tensors.items()}, copy / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(values | (config or {})))
    return copy


@pytest.mark.parametrize("prefix", [PUBLISHED, "model.language_model.", "model."])
def test_every_prefix_gives_the_same_answers(
    prefix: str, gemma: Family, tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    folder = renamed(gemma.folder, tmp_path / "copy", prefix)
    assert tokens_of(make_driver(runner_loader(folder)).greedy(gemma.prompts, NUM_TOKENS)) == gemma.expected


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["decoder.", "model.model.", "language_model.", ""])
def test_another_prefix_is_refused(prefix: str, gemma: Family, tmp_path: Path, runner_loader: Loader) -> None:
    with pytest.raises(LoadError, match=r"missing: `model.layers.0`"):
        runner_loader(renamed(gemma.folder, tmp_path / "copy", prefix))


def test_a_tensor_of_the_text_that_is_not_known_is_refused(
    gemma: Family, tmp_path: Path, runner_loader: Loader
) -> None:
    folder = renamed(gemma.folder, tmp_path / "copy", PUBLISHED)
    tensors = load_file(folder / "model.safetensors")
    norm = tensors[f"{PUBLISHED}norm.weight"]
    save_file({**tensors, f"{PUBLISHED}altup.weight": norm.clone()}, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"unexpected: `model.altup.weight`"):
        runner_loader(folder)


@pytest.mark.parametrize(
    ("outer", "inner", "stored", "tied"),
    [
        (True, False, False, True),
        (False, True, False, True),
        (None, None, False, True),
        (False, False, False, False),
        (True, True, True, False),
        (False, False, True, False),
    ],
)
def test_the_head_is_that_of_the_files_or_the_embedding_of_tied_ones(
    outer: bool | None, inner: bool | None, stored: bool, tied: bool, gemma: Family, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(gemma.folder, folder)
    values = json.loads((folder / "config.json").read_text())
    values["tie_word_embeddings"], values["text_config"]["tie_word_embeddings"] = outer, inner
    (folder / "config.json").write_text(json.dumps(values))
    if stored:
        tensors = load_file(folder / "model.safetensors")
        head = 2 * tensors[f"{PUBLISHED}embed_tokens.weight"]
        save_file({**tensors, "language_model.lm_head.weight": head}, folder / "model.safetensors")
    spec = load_model_spec(folder)
    assert spec.tie_word_embeddings is tied
    assert ("lm_head.weight" in spec.decoder.shapes()) is not tied


def test_without_a_head_that_is_not_tied_the_weights_are_refused_by_name(
    gemma: Family, tmp_path: Path, runner_loader: Loader
) -> None:
    values = json.loads((gemma.folder / "config.json").read_text())
    untied = {"tie_word_embeddings": False, "text_config": {**values["text_config"], "tie_word_embeddings": False}}
    with pytest.raises(LoadError, match=r"missing: `lm_head.weight`"):
        runner_loader(renamed(gemma.folder, tmp_path / "copy", PUBLISHED, untied))


def test_a_file_that_holds_an_encoder_alone_may_be_absent(
    gemma: Family, tmp_path: Path, runner_loader: Loader, make_driver: Drivers
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(gemma.folder, folder)
    (folder / "model.safetensors").unlink()
    tensors = load_file(gemma.folder / "model.safetensors")
    files = {name: "seen" if is_of_encoder(name) else "text" for name in tensors}
    assert set(files.values()) == {"seen", "text"}
    save_file({name: each for name, each in tensors.items() if files[name] == "text"}, folder / "text.safetensors")
    index = {"weight_map": {name: f"{file}.safetensors" for name, file in files.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tokens_of(make_driver(runner_loader(folder)).greedy(gemma.prompts, NUM_TOKENS)) == gemma.expected
    index["weight_map"][f"{PUBLISHED}norm.weight"] = "seen.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"lacks the weight file `seen.safetensors`"):
        runner_loader(folder)


def test_settings_that_files_lack_are_those_of_the_text_class(gemma: Family, tmp_path: Path) -> None:
    """Published files of Gemma 3 list six keys of their text."""
    config = {"text_config": {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6}}
    spec = load_model_spec(renamed(gemma.folder, tmp_path / "copy", PUBLISHED, config))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert [rope.theta for rope in spec.decoder.ropes()] == [10_000.0, 1_000_000.0]


def test_old_files_of_qwen_have_the_text_beside_the_encoder(gemma: Family, tmp_path: Path) -> None:
    values = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {"hidden_size": 32},
    }
    folder = renamed(gemma.folder, tmp_path / "copy", PUBLISHED)
    (folder / "config.json").write_text(json.dumps(values))
    spec = load_model_spec(folder)
    assert (spec.hidden_size, spec.num_layers, spec.decoder.text_only) == (64, 3, True)
    assert [(rope.theta, rope.scaling) for rope in spec.decoder.ropes()] == [(1_000_000.0, None)]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("InternVLChatModel", "InternVLForConditionalGeneration"),
        ("MllamaForConditionalGeneration", "cross-attention"),
        ("Gemma3nForCausalLM", "AltUp"),
        ("Gemma3nForConditionalGeneration", "AltUp"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_to_use(
    name: str, remedy: str, gemma: Family, tmp_path: Path, runner_loader: Loader
) -> None:
    folder = renamed(gemma.folder, tmp_path / "copy", PUBLISHED, {"architectures": [name], "model_type": "other"})
    with pytest.raises(LoadError, match=remedy):
        runner_loader(folder)
