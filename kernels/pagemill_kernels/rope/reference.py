"""The formula of rotation and cache write, and of the norms that some models apply to queries and keys before."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pagemill_kernels.kv_store.reference import store_kv
from pagemill_kernels.norm.reference import rms_norm


class HeadNorms(NamedTuple):
    """RMS norms of single heads; weights: [head_dim]."""

    query_weight: Tensor
    key_weight: Tensor
    eps: float


def norm_rope_and_store(
    heads: Tensor, num_heads: int, norms: HeadNorms, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor
) -> None:
    """Normalise each query and key in place, then do as `rope_and_store`."""
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    query.copy_(rms_norm(query, norms.query_weight, norms.eps))
    key.copy_(rms_norm(key, norms.key_weight, norms.eps))
    rope_and_store(heads, num_heads, cos, sin, cache, slots)


def rope_and_store(heads: Tensor, num_heads: int, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Rotate queries and keys in place, then write keys and values into one layer's cache.

    heads: [tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values. cos, sin: [tokens, 1, head_dim / 2]
    of each token's position. slots: int64 [tokens], block id * block_size + offset.
    """
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    apply_rope(heads[:, : num_heads + num_kv_heads], cos, sin)
    store_kv(heads[:, num_heads:], cache, slots)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x in place. x: [tokens, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    x.copy_(rotated)
