"""Rotation of queries and keys, and the write of keys and values into the paged cache, in one pass; float32."""

from __future__ import annotations

from torch import Tensor

from pagemill_kernels.cpu import launch
from pagemill_kernels.kv_store.storage import NATIVE_TYPES


def rope_and_store(heads: Tensor, num_heads: int, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> None:
    """heads: [tokens, num_heads + 2 * num_kv_heads, head_dim], contiguous, rotated in place; values are not.

    cos, sin: [tokens, 1, head_dim / 2], contiguous. cache: one layer's, of a type in `kv_store.storage.NATIVE_TYPES`.
    slots: int64 [tokens], block id * block_size + offset.
    """
    _store(heads, num_heads, cos.data_ptr(), sin.data_ptr(), cache, slots)


def store(heads: Tensor, num_heads: int, cache: Tensor, slots: Tensor) -> None:
    """The write alone, of keys that do not turn."""
    _store(heads, num_heads, None, None, cache, slots)


def _store(heads: Tensor, num_heads: int, cos: int | None, sin: int | None, cache: Tensor, slots: Tensor) -> None:
    num_tokens, width, head_dim = heads.shape
    launch.native().pagemill_rope_and_store(
        heads.data_ptr(),
        num_tokens,
        num_heads,
        (width - num_heads) // 2,
        head_dim,
        cos,
        sin,
        cache.data_ptr(),
        NATIVE_TYPES.index(cache.dtype),
        slots.data_ptr(),
        cache.shape[2],
        launch.num_threads(),
    )


def plan_slots(slot_mapping: Tensor, num_heads: int, block_size: int) -> Tensor:
    """slot_mapping: int64 [tokens], block id * block_size + offset; as it is, since each head finds its own place."""
    return slot_mapping.contiguous()
