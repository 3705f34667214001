"""Packed checkpoints that cannot be computed end the server's process before ready with tensor, value and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pagemill_models.spec.decoders import decoder_from_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}
GROUP = 32
AT_FAULT = "model.layers.0.mlp.down_proj."
Arrays = dict[str, np.ndarray[Any, Any]]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def awq(rows: int, columns: int) -> Arrays:
    groups = columns // GROUP
    return {
        "qweight": np.zeros((columns, rows // 8), np.int32),
        "qzeros": np.zeros((groups, rows // 8), np.int32),
        "scales": np.ones((groups, rows), np.float16),
    }


def gptq(rows: int, columns: int) -> Arrays:
    return awq(rows, columns) | {"qweight": np.zeros((columns // 8, rows), np.int32)}


def packed(rows: int, columns: int) -> Arrays:
    return {
        "weight_packed": np.zeros((rows, columns // 8), np.int32),
        "weight_shape": np.array([rows, columns], np.int64),
        "weight_scale": np.ones((rows, columns // GROUP), np.float16),
        "weight_zero_point": np.zeros((rows // 8, columns // GROUP), np.int32),
    }


def write(folder: Path, settings: dict[str, Any], pack: Callable[[int, int], Arrays], changes: Arrays) -> None:
    """Write a model of zeros; `changes` replaces tensors of one matrix."""
    config = CONFIG | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    stored: Arrays = {}
    for name, shape in decoder_from_config(config, folder / "config.json").shapes().items():
        if "proj." in name:
            parts = pack(shape[0], shape[1])
            stored |= {name.removesuffix("weight") + ending: each for ending, each in parts.items()}
        else:
            stored[name] = np.zeros(shape, np.float32)
    stored |= {AT_FAULT + ending: each for ending, each in changes.items()}
    save_file(stored, folder / "model.safetensors")


CASES: dict[str, tuple[dict[str, Any], Callable[[int, int], Arrays], Arrays, str, tuple[str, ...]]] = {
    "scales of another shape": (
        AWQ,
        awq,
        {"scales": np.ones((3, 5), np.float16)},
        "ModelUnreadable",
        ("down_proj.scales` has the shape [3, 5]; [3, 64] is wanted", "etch"),
    ),
    "zeros of another shape": (
        GPTQ,
        gptq,
        {"qzeros": np.zeros((3, 7), np.int32)},
        "ModelUnreadable",
        ("down_proj.qzeros` has the shape [3, 7]; [3, 8] is wanted", "etch"),
    ),
    "a width that is not read": (
        GPTQ | {"bits": 3},
        gptq,
        {},
        "UnsupportedQuantization",
        ("`quantization_config`", "`bits` 3 (4 or 8 is read)", "GGUF"),
    ),
    "a method that is not read": (
        {"quant_method": "aqlm"},
        awq,
        {},
        "UnsupportedQuantization",
        ("`aqlm` (`quantization_config`)", "compressed-tensors", "GGUF"),
    ),
    "zero points of another shape": (
        PACKED,
        packed,
        {"weight_zero_point": np.zeros((8, 2), np.int32)},
        "ModelUnreadable",
        ("down_proj.weight_zero_point` has the shape [8, 2]; [8, 3] is wanted",),
    ),
}


@pytest.mark.sample("scales*", "a method*")
@pytest.mark.parametrize("case", CASES)
def test_an_invalid_tensor_ends_the_process_with_tensor_value_and_remedy(
    case: str, start_server: Callable[..., Any], tmp_path: Path, byte_tokenizer: Any
) -> None:
    settings, pack, changes, reason, words = CASES[case]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(byte_tokenizer.bundle.tokenizer_json)
    write(folder, settings, pack, changes)
    server = start_server(engine={"model": str(folder), "null_runner": False, "max_model_len": 64})
    assert server.wait_exit() == 1
    lines = server.stderr().strip().splitlines()
    message = json.loads(lines[-1])
    assert message["reason"] == reason, message
    assert [word for word in words if word not in message["message"]] == [], message
    assert not any("Traceback" in line for line in lines)
