"""The formula of cache writes, which is also that of torch on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def store_kv(key_value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write cache[slot of token t, head h] = key_value[t, h].

    key_value: [tokens, 2 * num_kv_heads, head_dim], keys first. cache: [num_blocks, 2 * num_kv_heads, block_size,
    head_dim], each block contiguous. slots: int64 [tokens], block id * block_size + offset.
    """
    block_size, heads = cache.shape[2], torch.arange(cache.shape[1], device=cache.device)
    cache[slots[:, None] // block_size, heads, slots[:, None] % block_size] = key_value


def store_latents(latents: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write cache[slot of token t] = latents[t], [tokens, head_dim], in the cache's type.

    One vector contains a token's key and value.
    """
    block_size = cache.shape[2]
    cache[slots // block_size, 0, slots % block_size] = latents.to(cache.dtype)


def store(heads: Tensor, num_heads: int, cache: Tensor, slots: Tensor) -> None:
    """Write keys and values without a rotation; arguments as for `rope_and_store`."""
    store_kv(heads[:, num_heads:], cache, slots)
