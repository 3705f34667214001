"""Weights in a GGUF file, under Hugging Face names and in Hugging Face row order.

Converters store the query and key projections of the `llama` architecture with the two rotary halves of each head
interleaved; reading undoes it by reordering rows of stored bytes, which costs nothing beside dequantizing.
"""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_engine.loading.codes import CODE_KINDS, CodeKind, read_blocks, read_codes
from pagemill_engine.loading.dequantize import dequantize_into, supported_types
from pagemill_engine.loading.digest import gguf_digest
from pagemill_engine.loading.early_digest import EarlyDigest
from pagemill_engine.loading.errors import LoadError
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_protocol.gguf_file import GGUFFile, GGUFTensor

ROPE_FACTORS = "rope_freq_factors"
"""Name given to the table of rotary frequency divisors that some files carry."""

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": ROPE_FACTORS,
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_INTERLEAVED_ARCHITECTURES = ("llama",)


class GGUFWeights:
    """`WeightSource` over one file. Raises `LoadError` for corrupt files and unsupported storage types."""

    def __init__(self, path: Path, early_digest: EarlyDigest | None = None) -> None:
        self._file = GGUFFile(path)
        self._early_digest = early_digest
        self._path = path
        self._tensors = {hugging_face_name(name): tensor for name, tensor in self._file.tensors.items()}
        self._check_types()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read_into(self, name: str, out: Tensor) -> None:
        tensor = self._tensors[name]
        dequantize_into(tensor.ggml_type.name, self._stored(tensor), out)

    def code_kind(self, name: str) -> CodeKind | None:
        return CODE_KINDS.get(self._tensors[name].ggml_type.name)

    def read_codes(self, name: str) -> GroupCodes | None:
        if self.code_kind(name) is None:
            return None
        tensor = self._tensors[name]
        return read_codes(tensor.ggml_type.name, self._stored(tensor), tensor.shape)

    def read_blocks(self, name: str) -> CodeBlocks | None:
        tensor = self._tensors[name]
        return read_blocks(tensor.ggml_type.name, self._stored(tensor), tensor.shape)

    def is_bfloat16(self, name: str) -> bool:
        tensor = self._tensors[name]
        return tensor.ggml_type.name == "BF16" and len(tensor.shape) == 2

    def num_bytes(self, dtype: torch.dtype, keep_stored: bool) -> int:
        total = 0
        for name, tensor in self._tensors.items():
            kind = self.code_kind(name) if keep_stored else None
            kept = torch.bfloat16 if keep_stored and self.is_bfloat16(name) else dtype
            total += math.prod(tensor.shape) * (8 * kept.itemsize if kind is None else kind.stored_bits) // 8
        return total

    def digest(self) -> str:
        early = self._early_digest.of(self._path) if self._early_digest is not None else None
        return early or gguf_digest(self._file)

    def _stored(self, tensor: GGUFTensor) -> Tensor:
        """The tensor's bytes with its rows in Hugging Face order."""
        data = self._file.data(tensor.name)
        num_heads = self._interleaved_heads(tensor.name)
        return _as_torch(_uninterleave(data, tensor, num_heads) if num_heads else data)

    def _check_types(self) -> None:
        for tensor in self._tensors.values():
            if tensor.ggml_type.name not in supported_types():
                raise LoadError(
                    "UnsupportedQuantization",
                    f"`{self._path}`: tensor `{tensor.name}` is stored as {tensor.ggml_type.name}. "
                    f"Use a file in one of {', '.join(supported_types())} (K-quants such as Q4_K_M are made of these).",
                )

    def _interleaved_heads(self, name: str) -> int:
        """Heads of a tensor whose rows are interleaved; 0 for all others."""
        architecture = self._file.metadata.get("general.architecture")
        kind = name.split(".")[2] if name.startswith("blk.") else ""
        if architecture not in _INTERLEAVED_ARCHITECTURES or kind not in ("attn_q", "attn_k"):
            return 0
        num_heads = self._file.metadata[f"{architecture}.attention.head_count"]
        key = "head_count" if kind == "attn_q" else "head_count_kv"
        found = self._file.metadata.get(f"{architecture}.attention.{key}", num_heads)
        return int(found[0] if isinstance(found, list) else found)  # a value per layer; `model_spec` wants equal ones


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name without a counterpart stays as it
    is."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return _TOP.get(name, name)
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def _uninterleave(data: NDArray[np.uint8], tensor: GGUFTensor, num_heads: int) -> NDArray[np.uint8]:
    """Rows (2i, 2i + 1) of each head become (i, half + i)."""
    num_rows = tensor.shape[0]
    rows = data.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


def _as_torch(data: NDArray[np.uint8]) -> Tensor:
    with warnings.catch_warnings():
        # The mapping is read-only and so is our use of it.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data)
