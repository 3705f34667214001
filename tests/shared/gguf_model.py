"""Llama models as GGUF files of any storage type."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers": "blk",
}  # fmt: skip


DRAWN = ("Q", "IQ", "TQ", "NV")
"""Beginnings of the types whose blocks are drawn at random."""
HALVES = {
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_1": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "IQ1_M": [],
    "NVFP4": [],
}
"""The offsets of the float16 scales in a block, if they are not at its start."""
DEVIATIONS = {
    "IQ1_S": 1e-2,
    "IQ1_M": 1e-2,
    "TQ1_0": 5e-2,
    "TQ2_0": 5e-2,
    "IQ2_XXS": 1e-3,
    "IQ2_S": 1e-3,
    "IQ3_XXS": 5e-4,
    "IQ3_S": 5e-4,
}
"""Standard deviations of these scales, if they are not usual."""


def write_gguf(
    path: Path, model: Any, kinds: dict[str, str], factor: float | None = None, *, has_divisors: bool = False
) -> None:
    """Write a Llama's matrices as a GGUF file.

    `kinds` are storage types by a part of the tensor's name, by default F16. Matrices of quantized types are those of
    `stored_blocks`, not the model's. `factor`: of all values of each matrix, in a tensor beside it. `has_divisors`:
    whether a tensor divides the frequencies of rotations, as in Llama 3's files.
    """
    writer = gguf.GGUFWriter(path, "qwen2")  # its rows are in the project's order
    config = model.config
    kv_size = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config.vocab_size)
    for long_name, tensor in model.state_dict().items():
        name = long_name
        for hugging_face, short in _NAMES.items():
            name = name.replace(hugging_face, short)
        kind = next((kind for part, kind in kinds.items() if part in name), None)
        if factor is not None and tensor.dim() > 1:
            writer.add_tensor(name.replace(".weight", ".scale"), np.array([factor], dtype=np.float32))
            writer.add_tensor(name.replace(".weight", ".input_scale"), np.array([2.0], dtype=np.float32))
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.numpy())
        elif kind == "F64":
            writer.add_tensor(name, tensor.double().numpy())
        elif kind is None or not kind.startswith(DRAWN):
            storage = gguf.GGMLQuantizationType[kind or "F16"]
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), storage), raw_dtype=storage)
        else:
            stored = stored_blocks(kind, long_name, tensor.shape)
            writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    for layer in range(config.num_hidden_layers):
        for part, size in (("q", config.hidden_size), ("k", kv_size), ("v", kv_size)):
            writer.add_tensor(f"blk.{layer}.attn_{part}.bias", np.zeros(size, dtype=np.float32))
    if has_divisors:
        head_dim = config.hidden_size // config.num_attention_heads
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, head_dim // 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_blocks(kind: str, name: str, shape: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return random blocks of a storage type, different for each name, with scales that keep weights small."""
    rows, columns = shape
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    data = generator.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
    deviation = DEVIATIONS.get(kind, 1e-4 if kind.endswith(("K", "XS", "NL")) else 5e-3)
    for offset in HALVES.get(kind, [0]):
        values = generator.normal(0, deviation, data.shape[:2]).astype(np.float16)
        data[..., offset : offset + 2] = values[..., None].view(np.uint8).reshape(*data.shape[:2], 2)
    if kind == "NVFP4":  # small 8-bit floats
        data[..., :4] = generator.integers(1, 16, (*data.shape[:2], 4), dtype=np.uint8)
    if kind == "IQ1_M":  # the scale is in the upper four bits of four words
        bits = generator.normal(0, deviation, data.shape[:2]).astype(np.float16).view(np.uint16)
        upper = (bits[..., None] << np.array([12, 8, 4, 0], dtype=np.uint16)) & 0xF000
        words = np.ascontiguousarray(data[..., 48:]).view(np.uint16) & 0x0FFF
        data[..., 48:] = (words | upper).view(np.uint8)
    return data.reshape(rows, -1)
