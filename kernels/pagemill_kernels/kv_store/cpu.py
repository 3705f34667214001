"""Cache writes with torch on the CPU: one indexed row copy."""

from __future__ import annotations

from torch import Tensor


def store_kv(key_value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write keys and values; shapes as in `reference.store_kv`."""
    cache.view(-1, cache.shape[-1]).index_copy_(0, slots, key_value.reshape(-1, cache.shape[-1]))


def store(heads: Tensor, num_heads: int, cache: Tensor, slots: Tensor) -> None:
    """Write keys and values; shapes as in `reference.store`."""
    store_kv(heads[:, num_heads:], cache, slots)
