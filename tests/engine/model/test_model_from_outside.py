"""The model of docs/how-to/add-a-model.md, installed as a package of its own, gives the answers of its reference."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from greedy_families import greedy_reference
from packages import install_package
from safetensors.torch import save_file

from pagemill_execution.weights.errors import LoadError
from pagemill_models.declaration.known import known_architectures

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "add-a-model.md"
SIZE, NUM_HEADS, NUM_LAYERS, VOCAB_SIZE, CONTEXT, NUM_TOKENS = 64, 4, 2, 199, 128, 24
CONFIG = {
    "architectures": ["QuillForCausalLM"],
    "hidden_size": SIZE,
    "num_heads": NUM_HEADS,
    "num_layers": NUM_LAYERS,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT,
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the page's package as an installer does."""
    text, site = PAGE.read_text(), tmp_path / "site"
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (group, name, target) = re.findall(r'entry-points\."([^"]+)"\]\n(\w+) = "([^"]+)"', text)[0]
    install_package(site, monkeypatch, "quill", code, group, f"{name} = {target}")


def write_checkpoint(folder: Path) -> Any:
    """Write a checkpoint with Quill's names; return GPT-2, which is its reference."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=SIZE,
        n_layer=NUM_LAYERS,
        n_head=NUM_HEADS,
        n_positions=CONTEXT,
        initializer_range=0.3,
    )
    torch.manual_seed(5)
    reference = transformers.GPT2LMHeadModel(config).eval()
    body = reference.transformer
    tensors = {"quill.words.weight": body.wte.weight, "quill.positions.weight": body.wpe.weight}
    tensors |= named("quill.norm", body.ln_f.weight, body.ln_f.bias)
    for index, block in enumerate(body.h):
        name = f"quill.layers.{index}"
        matrices, biases = block.attn.c_attn.weight.T.chunk(3), block.attn.c_attn.bias.chunk(3)
        for part, matrix, bias in zip(("query", "key", "value"), matrices, biases, strict=True):
            tensors |= named(f"{name}.{part}", matrix, bias)
        for part, layer in (("out", block.attn.c_proj), ("up", block.mlp.c_fc), ("down", block.mlp.c_proj)):
            tensors |= named(f"{name}.{part}", layer.weight.T, layer.bias)
        for part, norm in (("norm_1", block.ln_1), ("norm_2", block.ln_2)):
            tensors |= named(f"{name}.{part}", norm.weight, norm.bias)
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return reference


def named(name: str, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": weight, f"{name}.bias": bias}


@pytest.mark.usefixtures("installed")
def test_a_model_of_another_package_gives_the_answers_of_its_reference(
    tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    reference = write_checkpoint(tmp_path)
    assert "QuillForCausalLM" in known_architectures()
    prompts = [list(range(length)) for length in (1, 2, 16, 17, 60)]
    expected = [greedy_reference(reference, prompt, NUM_TOKENS)[0] for prompt in prompts]
    driver = make_driver(runner_loader(tmp_path, max_model_len=CONTEXT))
    assert [result.token_ids for result in driver.greedy(prompts, NUM_TOKENS)] == expected


def test_without_the_package_the_model_is_refused_with_the_supported_ones(
    tmp_path: Path, runner_loader: Callable[..., Any]
) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(LoadError, match=r"`QuillForCausalLM`.*not supported.*LlamaForCausalLM") as error:
        runner_loader(tmp_path)
    assert error.value.reason == "UnsupportedArchitecture"
