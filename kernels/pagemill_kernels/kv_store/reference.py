"""The formula of cache writes, and the index arithmetic that every implementation shares."""

from __future__ import annotations

import torch
from torch import Tensor


def plan_slots(slot_mapping: Tensor, num_heads: int, block_size: int) -> Tensor:
    """Return a row of the cache, seen as [num_blocks * num_heads * block_size, head_dim], for each token and head.

    slot_mapping: int64 [tokens], block id * block_size + offset; num_heads: of keys and values together. Returns int64
    [tokens * num_heads].
    """
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    heads = torch.arange(num_heads, device=slot_mapping.device)
    return ((block[:, None] * num_heads + heads) * block_size + offset[:, None]).flatten()


def store_kv(key_value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write cache[slot of token t, head h] = key_value[t, h].

    key_value: [tokens, 2 * num_kv_heads, head_dim], keys first. cache: [num_blocks, 2 * num_kv_heads, block_size,
    head_dim]. slots: `plan_slots(slot_mapping, 2 * num_kv_heads, block_size)`.
    """
    cache.view(-1, cache.shape[-1])[slots] = key_value.flatten(0, 1)


def store_latents(latents: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write cache[slot of token t] = latents[t], [tokens, head_dim], in the cache's type.

    One vector contains a token's key and value.
    """
    cache.view(-1, cache.shape[-1])[slots] = latents.to(cache.dtype)


def store(heads: Tensor, num_heads: int, cache: Tensor, slots: Tensor) -> None:
    """Write keys and values without a rotation; arguments as for `rope_and_store`."""
    store_kv(heads[:, num_heads:], cache, slots)
