"""The layout of the paged cache: floats, or 8-bit values with a float32 scale for every token and head.

A layer's cache is [num_blocks, 2 * num_kv_heads, block_size, token_bytes / item size] of `TORCH_TYPES`. In int8 the
last axis has four bytes more than head_dim; a head's part of a block is block_size * head_dim values, then block_size
scales, whatever the axes say (cpu/src/kv_store.h). fp8 (e4m3) has the same layout. 8-bit types, and float types other
than that of the computation, need kernels that support them: C++ supports `kinds.NATIVE`, Triton all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill_kernels.kv_store import kinds
from pagemill_kernels.kv_store.kinds import SCALE_BYTES, KVType

TORCH_TYPES: dict[KVType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
LARGEST_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""8-bit types, and the magnitude to which the largest value of a token and head is scaled."""
_KINDS: dict[torch.dtype, KVType] = {dtype: kind for kind, dtype in TORCH_TYPES.items()}


def token_width(dtype: torch.dtype, head_dim: int) -> int:
    """Return the elements of one token in one head, including its scale."""
    return kinds.token_width(_KINDS[dtype], head_dim)


def scales(cache: Tensor) -> Tensor:
    """Return a view of the scales of an 8-bit cache, float32 [blocks, 2 * num_kv_heads, block_size]."""
    codes = cache.shape[2] * (cache.shape[3] - SCALE_BYTES)
    return cache.flatten(2)[..., codes:].view(torch.float32)


def encode(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Quantize x, float32 [..., head_dim], to 8-bit values like it and float32 scales [...].

    Values that are not finite become 0.
    """
    largest = LARGEST_CODES[dtype]
    found = x.abs().amax(-1) / largest + (x * 0).sum(-1)
    divisor = torch.where(found > 0, found, torch.inf)[..., None]
    scaled = (x / divisor).nan_to_num(0.0, 0.0, 0.0)
    return (scaled.round() if dtype == torch.int8 else scaled.clamp(-largest, largest)).to(dtype), found


def write_blocks(cache: Tensor, x: Tensor) -> None:
    """Quantize x, float32 [blocks, 2 * num_kv_heads, block_size, head_dim], into an 8-bit cache."""
    codes, found = encode(x, cache.dtype)
    cache.flatten(2)[..., : codes[0, 0].numel()] = codes.flatten(2)
    scales(cache)[:] = found


def decode(cache: Tensor) -> Tensor:
    """Return the values of a cache of any type, float32 [blocks, 2 * num_kv_heads, block_size, head_dim]."""
    if cache.dtype not in LARGEST_CODES:
        return cache.float()
    blocks, heads, block_size, width = cache.shape
    head_dim = width - SCALE_BYTES
    codes = cache.flatten(2)[..., : block_size * head_dim].view(blocks, heads, block_size, head_dim)
    return codes.float() * scales(cache)[..., None]
