"""Rotation of queries and keys, and the write of keys and values into the paged cache, in one native pass; float32."""

from __future__ import annotations

from pagemill_kernels.arrays import Array, address
from pagemill_kernels.cpu import launch
from pagemill_kernels.kv_store import kinds


def rope_and_store(heads: Array, num_heads: int, cos: Array, sin: Array, cache: Array, slots: Array) -> None:
    """Rotate queries and keys in place, then write keys and values into the cache.

    heads: [tokens, num_heads + 2 * num_kv_heads, head_dim], contiguous. cos, sin: [tokens, 1, head_dim / 2],
    contiguous. cache: one layer's, of a type in `kv_store.kinds.NATIVE`, each block contiguous. slots: int64 [tokens],
    block id * block_size + offset.
    """
    _store(heads, num_heads, address(cos), address(sin), cache, slots)


def store(heads: Array, num_heads: int, cache: Array, slots: Array) -> None:
    """Write keys and values without a rotation."""
    _store(heads, num_heads, None, None, cache, slots)


def rotate(x: Array, cos: Array, sin: Array) -> None:
    """Rotate x in place. x: float32 [tokens, heads, head_dim], each token's heads contiguous. cos, sin: as above."""
    turning = address(cos), address(sin)
    launch.native().pagemill_rotate(address(x), *x.shape, launch.row_stride(x), *turning, launch.num_threads())


def _store(heads: Array, num_heads: int, cos: int | None, sin: int | None, cache: Array, slots: Array) -> None:
    num_tokens, width, head_dim = heads.shape
    launch.native().pagemill_rope_and_store(
        address(heads),
        num_tokens,
        num_heads,
        (width - num_heads) // 2,
        head_dim,
        launch.row_stride(heads),
        cos,
        sin,
        address(cache),
        kinds.native_number(cache),
        address(slots),
        cache.shape[2],
        cache.strides[0],
        launch.num_threads(),
    )
