"""Folders of models without weights: `config.json` and the index of files that do not exist."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pagemill_models.files.safetensors_header import INDEX_FILE, read_header
from pagemill_models.spec.decoders import decoder_from_config


def outline(folder: Path, *, num_shards: int = 2) -> None:
    """Remove the weights of `folder` and write an index of this number of shards that would contain them."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = [tensor for file in files for tensor in read_header(file)]
    shards = [f"model-{number + 1:05}-of-{num_shards:05}.safetensors" for number in range(num_shards)]
    weight_map = {tensor.name: shards[at % num_shards] for at, tensor in enumerate(tensors)}
    metadata = {"total_size": sum(tensor.num_bytes for tensor in tensors)}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    for file in files:
        file.unlink()


QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
QWEN_7B = {
    **QWEN,
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
QWEN_14B = {
    **QWEN,
    "num_hidden_layers": 48,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-7B-Instruct": QWEN_7B,
    "Qwen/Qwen2.5-14B-Instruct": QWEN_14B,
    "Qwen/Qwen2.5-14B-Instruct-AWQ": {**QWEN_14B, "torch_dtype": "float16", "quantization_config": AWQ},
}
"""The dimensions of models that documentation pages name, from their config.json."""


def write_outline(folder: Path, config: dict[str, Any]) -> Path:
    """Write `config.json` and an index of a model with these dimensions, with floats or with AWQ's packed matrices."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = decoder_from_config(config, folder / "config.json").shapes()
    names: list[str] = []
    num_bytes = 0
    for name, shape in shapes.items():
        is_packed = "quantization_config" in config and "_proj.weight" in name
        endings = ("qweight", "qzeros", "scales") if is_packed else ("weight",)
        names += [name.removesuffix("weight") + ending if name.endswith("weight") else name for ending in endings]
        num_bytes += math.prod(shape) // 2 if is_packed else 2 * math.prod(shape)
    index = {
        "metadata": {"total_size": num_bytes},
        "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors"),
    }
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return folder
