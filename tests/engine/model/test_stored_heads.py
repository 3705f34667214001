"""A head in the files is used beside `tie_word_embeddings: true` if it differs from the embedding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_models import GPT2, LLAMA, VOCAB_SIZE, write_model
from greedy_families import NUM_TOKENS, family_of, tokens_of
from safetensors.torch import load_file, save_file

from pagemill_models.files.partial_download import FileLink, PartialDownload
from pagemill_models.spec.model_files import load_model_spec, load_spec_without_weights

MODELS = {
    "llama": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, "model.embed_tokens.weight"),
    "gpt2": ("GPT2LMHeadModel", GPT2, "transformer.wte.weight"),
}


def write_head(name: str, folder: Path, change: Callable[[torch.Tensor], torch.Tensor], *, shards: bool) -> None:
    """Write a model whose configuration ties, and beside its embedding a head: `change` of the embedding."""
    class_name, values, embedding = MODELS[name]
    write_model(class_name, values, folder)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    head = {"lm_head.weight": change(tensors[embedding]).clone()}
    if not shards:
        save_file(tensors | head, folder / "model.safetensors")
        return
    (folder / "model.safetensors").unlink()
    files = {"model-00001-of-00002.safetensors": tensors, "model-00002-of-00002.safetensors": head}
    for file, part in files.items():
        save_file(part, folder / file)
    index = {"metadata": {}, "weight_map": {each: file for file, part in files.items() for each in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def one_value_more(weight: torch.Tensor) -> torch.Tensor:
    changed = weight.clone()
    changed[-1, -1] += 1
    return changed


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "two files"])
@pytest.mark.parametrize("name", MODELS)
def test_a_head_that_differs_is_used(
    name: str, shards: bool, tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    write_head(name, tmp_path, lambda weight: weight.flip(0), shards=shards)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    family = family_of(reference, tmp_path, VOCAB_SIZE, (1, 17, 33))
    assert tokens_of(make_driver(runner_loader(tmp_path)).greedy(family.prompts, NUM_TOKENS)) == family.expected


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "two files"])
@pytest.mark.parametrize(
    ("change", "tied"),
    [(lambda weight: weight, True), (one_value_more, False), (lambda weight: weight.double(), False)],
    ids=["copy", "another last value", "another type"],
)
def test_only_a_copy_of_the_embedding_is_in_memory_once(
    change: Callable[[torch.Tensor], torch.Tensor], tied: bool, shards: bool, tmp_path: Path
) -> None:
    write_head("llama", tmp_path, change, shards=shards)
    spec = load_model_spec(tmp_path)
    assert spec.tie_word_embeddings is tied
    embedding = VOCAB_SIZE * LLAMA["hidden_size"]
    others = sum(each.numel() for name, each in every_tensor(tmp_path).items() if name != "lm_head.weight")
    assert spec.num_parameters == others + (0 if tied else embedding)


def every_tensor(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def test_a_plan_from_an_index_counts_a_stored_head(tmp_path: Path) -> None:
    write_head("llama", tmp_path, lambda weight: weight, shards=True)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert load_spec_without_weights(tmp_path).tie_word_embeddings is False


def test_a_head_that_still_arrives_is_not_waited_for(tmp_path: Path) -> None:
    write_head("llama", tmp_path / "files", lambda weight: weight, shards=True)
    files = list((tmp_path / "files").iterdir())
    links = {file.name: FileLink(file, file.stat().st_size, "00002" not in file.name) for file in files}
    download = PartialDownload(tmp_path / "model", links)
    assert load_model_spec(download.folder).tie_word_embeddings is False
    download.close()
