"""The paged KV cache in the machine's memory: its arrays, and copies between blocks.

`device_kv_cache` is the counterpart for a device with memory of its own.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

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

    All layers of a block are adjacent. Memory is touched in pages of up to 2 MiB: the first block costs one such page,
    not one in every layer. The block after the last one is the padding block, which is read and stays zero.
    """

    def __init__(self, num_blocks: int, num_layers: int, head_shape: tuple[int, int, int], kind: KVType) -> None:
        self.num_blocks = num_blocks
        self._num_layers = num_layers
        self._block_size = head_shape[1]
        self._kind = kind
        pool = _lazy_zeros(((num_blocks + 1) * num_layers, *head_shape), kinds.NUMPY_TYPES[kind])
        self.rows = [pool[layer:] for layer in range(num_layers)]
        """The contiguous array of each layer for kernels, in which `rows_of` gives a block's row."""
        self.layers = [pool[layer::num_layers] for layer in range(num_layers)]

    @property
    def padding_block(self) -> int:
        return self.num_blocks

    @property
    def padding_row(self) -> int:
        return self.num_blocks * self._num_layers

    def rows_of(self, block_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return block_ids * self._num_layers

    def row_slots_of(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert slots from block id * block_size + offset to row * block_size + offset."""
        return slots + slots // self._block_size * (self._block_size * (self._num_layers - 1))

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
    """Keys and values in blocks. `layers[i]`: [num_blocks + 1, cache_heads, block_size, token width].

    The layout is in `pagemill_kernels.kv_store`, that of quantized caches in its `storage`. `rows[i]`: the layer's
    contiguous array for kernels; see `KindBlocks`, of which there is one per cache kind. All are empty between
    `release` and `allocate`. Raises `LoadError` if the machine does not have the memory.
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
        self._layers_of = [each.layers or tuple(range(spec.num_layers)) for each in cache_kinds]
        self._block_size = block_size
        self._kind = kind
        self._head_shape = (spec.cache_heads, block_size, kinds.token_width(kind, spec.head_dim))
        self._num_layers = spec.num_layers
        layer_bytes = block_size * spec.cache_heads * kinds.token_bytes(kind, spec.head_dim)
        sizes = zip(self._counts, self._layers_of, strict=True)
        self.num_bytes = sum(count * len(layers) for count, layers in sizes) * layer_bytes
        self.of_kinds: list[KindBlocks] = []
        self.layers: list[Array] = []
        self.rows: list[Array] = []
        self.allocate()

    def allocate(self) -> None:
        """Allocate all blocks, filled with zeros. Raises `LoadError` if the memory is too small."""
        if self.num_bytes > memory_limit():
            raise too_large(max(self._counts), self._block_size, self.num_bytes)
        try:
            self.of_kinds = [
                KindBlocks(count, len(layers), self._head_shape, self._kind)
                for count, layers in zip(self._counts, self._layers_of, strict=True)
            ]
        except MemoryError as error:
            raise too_large(max(self._counts), self._block_size, self.num_bytes) from error
        found = {
            layer: (own.layers[place], own.rows[place])
            for layers, own in zip(self._layers_of, self.of_kinds, strict=True)
            for place, layer in enumerate(layers)
        }
        self.layers, self.rows = ([found[layer][part] for layer in range(self._num_layers)] for part in (0, 1))

    def release(self) -> None:
        """Return all of its memory to the machine."""
        self.of_kinds, self.layers, self.rows = [], [], []


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


def _lazy_zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
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
