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
    2 MiB: the first block costs one such page, not one in every layer. The block after the last one is the padding
    block, which is read and stays zero.
    """

    def __init__(self, num_blocks: int, shapes: Sequence[tuple[int, int, int]], kind: KVType) -> None:
        """Allocate the blocks. `shapes`: of a block in each layer."""
        self.num_blocks = num_blocks
        self._kind = kind
        ends = list(accumulate(map(math.prod, shapes), initial=0))
        pool = _lazy_zeros((num_blocks + 1, ends[-1]), kinds.NUMPY_TYPES[kind])
        places = zip(ends, ends[1:], shapes, strict=False)
        self.layers = [pool[:, start:end].reshape(len(pool), *shape) for start, end, shape in places]
        """Of each layer: views of the same array."""

    @property
    def padding_block(self) -> int:
        return self.num_blocks

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks by (source, destination) pairs. Every source is read before any destination is written."""
        if not copies:
            return
        sources, destinations = np.array(copies, dtype=np.int64).T
        for cache in self.layers:
            cache[destinations] = cache[sources]

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
    ) -> None:
        """Allocate the blocks of each of `cache_kinds`."""
        self.cache_kinds = cache_kinds
        self._counts = [num_blocks] if isinstance(num_blocks, int) else list(num_blocks)
        shapes = spec.cache_shapes
        all_layers = () if any(each.layers for each in cache_kinds) else tuple(range(len(shapes)))
        self._layers_of = [each.layers or all_layers for each in cache_kinds]
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
        try:
            self.of_kinds = [
                KindBlocks(count, [self._shapes[layer] for layer in layers], self._kind)
                for count, layers in zip(self._counts, self._layers_of, strict=True)
            ]
        except MemoryError as error:
            raise too_large(max(self._counts), self._block_size, self.num_bytes) from error
        found = {
            layer: blocks
            for layers, own in zip(self._layers_of, self.of_kinds, strict=True)
            for layer, blocks in zip(layers, own.layers, strict=True)
        }
        self.layers = [found[layer] for layer in range(len(self._shapes))]

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
