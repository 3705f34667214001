"""The formula of rotation and cache write."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill_kernels.kv_store.reference import store_kv


def rope_and_store(heads: Tensor, num_heads: int, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Rotate queries and keys in place, then write keys and values into one layer's cache.

    heads: [tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values. cos, sin: [tokens, 1, head_dim / 2]
    of each token's position. slots: by `plan_slots`.
    """
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    apply_rope(heads[:, : num_heads + num_kv_heads], cos, sin)
    store_kv(heads[:, num_heads:], cache, slots)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x in place. x: [tokens, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    x.copy_(rotated)
