"""The paged KV cache in the machine's memory: its arrays, and copies between blocks.

`device_kv_cache` is the counterpart for a device with memory of its own.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pagemill_engine.kv.split import end_of_ids
from pagemill_engine.sizing.kv_sizes import too_large
from pagemill_engine.sizing.memory import memory_limit
from pagemill_kernels import arrays
from pagemill_kernels.arrays import Array
from pagemill_kernels.kv_store import kinds
from pagemill_kernels.kv_store.kinds import KVType
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_protocol.report.cache_kinds import FULL, CacheKind


class KindBlocks:
    """The blocks of one cache kind, in one array over all of its layers.

    All layers of a block are adjacent, so a layer's blocks are a stride apart. Memory is touched in pages of up to
    2 MiB: the first block costs one such page, not one in every layer. The last block of the array is the padding
    block, which is read and stays zero.
    """

    def __init__(self, pool: Array, shapes: Sequence[tuple[int, int, int]], kind: KVType) -> None:
        """`pool`: [blocks, values of a block]. `shapes`: of a block in each layer."""
        self._pool, self._kind = pool, kind
        self.padding_block = len(pool) - 1
        ends = list(accumulate(map(math.prod, shapes), initial=0))
        places = zip(ends, ends[1:], shapes, strict=False)
        self.layers = [pool[:, start:end].reshape(len(pool), *shape) for start, end, shape in places]
        """Of each layer: views of the same array."""

    @property
    def num_blocks(self) -> int:
        return self.padding_block

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks by (source, destination) pairs. Every source is read before any destination is written."""
        if copies:
            self.fill([copy for _, copy in copies], self.contents([source for source, _ in copies]))

    def contents(self, block_ids: Sequence[int]) -> Array:
        """Return a copy of blocks."""
        copied: Array = self._pool[list(block_ids)]
        return copied

    def fill(self, block_ids: Sequence[int], contents: Array) -> None:
        self._pool[list(block_ids)] = contents

    def scrub(self, block_ids: NDArray[np.int64]) -> None:
        """Replace non-finite values by 0, so that padding cannot read a failed request's values."""
        for cache in self.layers:
            cache[block_ids] = _finite(cache[block_ids], self._kind)


class KVCache:
    """Keys and values in blocks. `layers[i]`: [blocks of its kind + 1, cache_heads, block_size, token width], each
    block contiguous.

    The layout is in `pagemill_kernels.kv_store`, that of quantized caches in its `storage`. `layers` and `of_kinds` are
    empty between `release` and `allocate`. Raises `LoadError` if the machine does not have the memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int | Sequence[int],
        block_size: int,
        kind: KVType,
        cache_kinds: Sequence[CacheKind] = (FULL,),
        *,
        shares_memory: bool = False,
    ) -> None:
        """Allocate the blocks of each of `cache_kinds`. `shares_memory`: whether memory may move between the first and
        the last of them; each then has blocks for all of it."""
        self.cache_kinds = cache_kinds
        self._counts = [num_blocks] if isinstance(num_blocks, int) else list(num_blocks)
        shapes = spec.cache_shapes
        all_layers = () if any(each.layers for each in cache_kinds) else tuple(range(len(shapes)))
        self._layers_of = [each.layers or all_layers for each in cache_kinds]
        self._shares_memory = shares_memory and len(cache_kinds) > 1
        self._block_size = block_size
        self._kind = kind
        self._shapes = [(heads, block_size, kinds.token_width(kind, size)) for heads, size in shapes]
        self.num_bytes = sum(
            count * block_size * heads * kinds.token_bytes(kind, size)
            for count, layers in zip(self._counts, self._layers_of, strict=True)
            for heads, size in map(shapes.__getitem__, layers)
        )
        self.of_kinds: list[KindBlocks] = []
        self.layers: list[Array] = []
        self.allocate()

    def allocate(self) -> None:
        """Allocate all blocks, filled with zeros. Raises `LoadError` if the memory is too small."""
        if self.num_bytes > memory_limit():
            raise too_large(max(self._counts), self._block_size, self.num_bytes)
        shapes = [[self._shapes[layer] for layer in layers] for layers in self._layers_of]
        widths = [sum(map(math.prod, own)) for own in shapes]
        try:
            pools = [
                _lazy_zeros((count + 1, width), self._dtype) for count, width in zip(self._counts, widths, strict=True)
            ]
            if self._shares_memory:
                pools[0], pools[-1] = self._shared(widths[0], widths[-1])
            self.of_kinds = [KindBlocks(pool, own, self._kind) for pool, own in zip(pools, shapes, strict=True)]
        except MemoryError as error:
            raise too_large(max(self._counts), self._block_size, self.num_bytes) from error
        found = {
            layer: blocks
            for layers, own in zip(self._layers_of, self.of_kinds, strict=True)
            for layer, blocks in zip(layers, own.layers, strict=True)
        }
        self.layers = [found[layer] for layer in range(len(self._shapes))]

    def _shared(self, low: int, high: int) -> tuple[Array, Array]:
        """Return the blocks of the first and the last kind, of `low` and `high` values, in one arena (`kv.split`).
        Their padding blocks are behind it."""
        size = self._counts[0] * low + self._counts[-1] * high
        end = end_of_ids(self.cache_kinds, self._counts)
        padding = -(-(size + high) // low)
        arena = _lazy_zeros(((padding + 1) * low,), self._dtype)
        start = size - end * high
        return arena.reshape(-1, low), arena[start : size + high].reshape(end + 1, high)

    @property
    def _dtype(self) -> str:
        return kinds.NUMPY_TYPES[self._kind]

    def release(self) -> None:
        """Return all of its memory to the machine."""
        self.of_kinds, self.layers = [], []


def _finite(blocks: Array, kind: KVType) -> Array:
    """Replace non-finite values of the contiguous blocks in place and return the blocks."""
    if kind in kinds.CODES:
        # Quantized values are always finite, their scales are not.
        flat = blocks.reshape(*blocks.shape[:2], -1).view(np.uint8)
        scales = flat[..., -blocks.shape[2] * kinds.SCALE_BYTES :].copy().view(np.float32)
        flat[..., -blocks.shape[2] * kinds.SCALE_BYTES :] = _only_finite(scales).view(np.uint8)
    elif kind == "bfloat16":
        blocks[~np.isfinite(arrays.widened(blocks))] = 0
    else:
        _only_finite(blocks)
    return blocks


def _only_finite(values: Array) -> Array:
    values[~np.isfinite(values)] = 0
    return values


def _lazy_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return zeros that take memory only once they are written, and whose memory is freed with the array."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if not num_bytes:  # no block is kept, and mmap refuses an empty map
        return np.zeros(shape, dtype=dtype)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of memory cannot be allocated: {error.strerror}") from error
    with suppress(OSError, AttributeError):
        # A hint, as numpy gives for large arrays: not every kernel supports it.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8).view(dtype).reshape(shape)
