"""Adapters' folders: every key of PEFT's settings is known, every tensor is used, and what is not served is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
from declared_families import declared
from safetensors.numpy import save_file

from pagemill_models.adapters.errors import AdapterError
from pagemill_models.adapters.folder import another_base, read_adapter
from pagemill_models.adapters.settings import REFUSED, USED, WITHOUT_EFFECT

LLAMA = declared("llama")
RANK = 4
PREFIX = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"


def tensors_of(module: str = Q, prefix: str = PREFIX, ending: str = ".weight", rank: int = RANK) -> dict[str, Any]:
    rows, ins = LLAMA.shapes()[f"{Q}.weight"]
    return {
        f"{prefix}{module}.lora_A{ending}": np.ones((rank, ins), np.float32),
        f"{prefix}{module}.lora_B{ending}": np.ones((rows, rank), np.float32),
    }


def write(folder: Path, tensors: dict[str, Any], **settings: Any) -> Path:
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": r".*layers\.0\.self_attn\.q_proj"}
    (folder / "adapter_config.json").write_text(json.dumps(values | settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def refusal(folder: Path, max_rank: int = 16) -> AdapterError:
    with pytest.raises(AdapterError) as refused:
        read_adapter(folder, LLAMA, max_rank)
    return refused.value


def test_every_setting_of_peft_is_used_has_no_effect_or_is_refused() -> None:
    known = USED | WITHOUT_EFFECT.keys() | REFUSED.keys()
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= known
    assert len(USED) + len(WITHOUT_EFFECT) + len(REFUSED) == len(known), "each has one place"


@pytest.mark.parametrize(
    "settings",
    [*({key: {"any": 1}} for key in REFUSED), {"a_later_key": True}, {"init_lora_weights": "pissa_niter_4"},
     {"init_lora_weights": "olora"}, {"peft_type": "LOHA"}, {"init_lora_weights": "LoftQ"}],
)  # fmt: skip
def test_settings_that_are_not_served_are_named(settings: dict[str, Any], tmp_path: Path) -> None:
    error = refusal(write(tmp_path, tensors_of(), **settings))
    assert error.reason == "AdapterUnsupported"
    assert next(iter(settings)) in error.message


def test_settings_without_a_value_or_an_effect_are_served(tmp_path: Path) -> None:
    unset = {**dict.fromkeys(REFUSED), **dict.fromkeys(WITHOUT_EFFECT, "x"), "a_later_key": None, "other": {}}
    assert len(read_adapter(write(tmp_path, tensors_of(), **unset), LLAMA, 16).parts) == 1


@pytest.mark.parametrize(
    ("module", "prefix", "ending"),
    [
        (Q, PREFIX, ".weight"),
        (Q, "", ".weight"),
        (Q, PREFIX, ".default.weight"),
        (Q.replace("model.", "model.language_model."), PREFIX, ".weight"),
        (Q.replace("model.", "language_model.model."), PREFIX, ".weight"),
        (Q.removeprefix("model."), PREFIX, ".weight"),
    ],
)
def test_names_as_people_have_them(module: str, prefix: str, ending: str, tmp_path: Path) -> None:
    (part,) = read_adapter(write(tmp_path, tensors_of(module, prefix, ending)), LLAMA, 16).parts
    assert (part.use.layer, part.use.role, part.first_row, part.rank, part.scale) == (0, "qkv", 0, RANK, 2.0)


@pytest.mark.parametrize("targets", [["down_proj", "gate_up_proj"], ["gate_up_proj", "down_proj"]], ids=str)
def test_targeted_parameters_of_experts_change_no_rank_of_a_linear_layer(targets: list[str], tmp_path: Path) -> None:
    """PEFT makes these settings of `all-linear` for a mixture, with the targets in the order of a set."""
    ranks = {r".*\.gate_up_proj": 2 * RANK}
    settings = {"target_parameters": targets, "rank_pattern": ranks, "alpha_pattern": {r".*\.gate_up_proj": 16}}
    (part,) = read_adapter(write(tmp_path, tensors_of(), **settings), LLAMA, 16).parts
    assert (part.rank, part.scale) == (RANK, 2.0)
    error = refusal(write(tmp_path, tensors_of("model.layers.1.self_attn.q_proj"), **settings))
    assert "does not target" in error.message


def more(name: str, shape: tuple[int, ...] = (3,)) -> dict[str, Any]:
    return tensors_of() | {name: np.zeros(shape, np.float32)}


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (more(f"{PREFIX}{Q}.lora_magnitude_vector"), "use_dora=False"),
        (more(f"{PREFIX}{Q}.lora_B.bias"), "trained bias"),
        (more(f"{PREFIX}{Q}.bias"), "trained bias"),
        (more(f"{PREFIX}model.norm.weight"), "no copy of a matrix"),
        (more("what.is.this"), "`what.is.this` is no matrix of LoRA"),
        (tensors_of("model.vision_tower.layers.0.self_attn.q_proj"), "no linear layer of this model"),
        (tensors_of("model.layers.99.self_attn.q_proj"), "no linear layer of this model"),
        (tensors_of("model.layers.1.self_attn.q_proj"), "does not target"),
        (dict(list(tensors_of().items())[:1]), "no B beside it"),
        ({}, "no tensor of LoRA"),
    ],
)
def test_a_tensor_that_cannot_be_used_is_named(tensors: dict[str, Any], named: str, tmp_path: Path) -> None:
    assert named in refusal(write(tmp_path, tensors)).message


def test_a_targeted_layer_without_tensors_is_named(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, tensors_of(), target_modules=["q_proj"]))
    assert "no tensor of `model.layers.1.self_attn.q_proj`" in error.message


def test_a_rank_over_the_limit_names_both(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, tensors_of(rank=32), r=32))
    assert error.reason == "AdapterTooLarge"
    assert "has rank 32; this engine serves ranks up to 16" in error.message


def test_shapes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    tensors = {name: values[:, :-1] for name, values in tensors_of().items()}
    error = refusal(write(tmp_path, tensors))
    assert error.reason == "AdapterOfAnotherModel"
    assert f"{Q}.lora_A.weight" in error.message


def test_a_pickle_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    assert "safe_serialization=True" in refusal(tmp_path).message


def test_an_adapter_of_a_base_of_another_name_gets_a_warning(tmp_path: Path) -> None:
    files = read_adapter(write(tmp_path, tensors_of(), base_model_name_or_path="meta/Other-1B"), LLAMA, 16)
    assert "trained on `meta/Other-1B`" in str(another_base(files, "/models/mine"))
    assert another_base(files, "hf://copies/other-1b") is None
