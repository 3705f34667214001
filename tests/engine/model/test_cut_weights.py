"""A rank reads its rows and columns from files and nothing else of these tensors, with the values of the whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cut_weights import Uncut, noted_reads, same, stored_form
from gguf_model import write_gguf
from ranked_engine import BASE, saved

from pagemill_engine.config import EngineConfig
from pagemill_execution.sizing.rank_parts import part_of
from pagemill_execution.sizing.sizing import weights_of
from pagemill_models.spec.model_files import load_model_spec

UNEVEN = {
    "hidden_size": 96,
    "intermediate_size": 104,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return noted_reads(monkeypatch)


def gguf(folder: Path, output: str = "Q8_0", **changes: int) -> Path:
    torch.manual_seed(3)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= changes
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE | sizes))
    write_gguf(
        folder / "m.gguf", model, {"ffn_down": "Q6_K", "ffn_up": "Q4_1", "ffn_gate": "Q8_0", "attn_output": output}
    )
    return folder / "m.gguf"


def model_of(name: str, folder: Path, smollm2: Path) -> Path:
    if name == "embedded":
        return smollm2
    if name == "GPT2":
        config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=131)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        return folder
    if name == "gguf, parts of blocks":  # a rank's four heads are the columns of one block and a half
        return gguf(folder, "Q4_K", hidden_size=768, intermediate_size=768, num_key_value_heads=8)
    return gguf(folder) if name == "gguf" else saved(name, folder, **UNEVEN if name == "Llama" else {})


@pytest.mark.parametrize(
    ("name", "settings", "most"),
    [
        ("Llama", {}, 0.65),
        ("Llama", {"quantization": "int8"}, 0.75),
        ("Mixtral", {}, 0.70),
        ("GPT2", {}, 0.85),
        ("gguf", {}, 0.55),
        ("gguf, parts of blocks", {}, 0.56),
        ("gguf, parts of blocks", {"quantization": "int8"}, 0.56),
        ("embedded", {}, 0.60),
    ],
    ids=str,
)
def test_parts_of_files_have_the_values_of_whole_tensors(
    name: str, settings: dict[str, Any], most: float, tmp_path: Path, smollm2_path: Path, read: list[int]
) -> None:
    """`most`: the share of a model's bytes that a rank of two reads; norms and positions are on both."""
    path = model_of(name, tmp_path, smollm2_path)
    config, spec = EngineConfig(model=str(path), **settings), load_model_spec(path)
    whole = weights_of(config, path, spec, True)
    for rank in range(2):
        part = part_of(spec, rank, 2, [(0, spec.num_layers)])
        own, expected = part.weights(whole, spec.decoder), part.weights(Uncut(whole), spec.decoder)  # type: ignore[arg-type]
        assert own.shapes == expected.shapes
        assert own.num_bytes("float32", True) == expected.num_bytes("float32", True)
        num_read = 0
        for each in part.spec.decoder.shapes():
            read.clear()
            found = stored_form(own, each)
            num_read += sum(read)
            assert same(found, stored_form(expected, each)), each
        assert num_read < most * spec.weight_bytes
