"""The paged KV cache in the machine's memory: its arrays, and copies between blocks.

`device_kv_cache` is the counterpart for a device with memory of its own.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.arena import arena_of
from pagemill_execution.decoders.step_model import LayerCache, StateArrays
from pagemill_execution.sizing.kv_sizes import too_large
from pagemill_execution.sizing.memory import memory_limit
from pagemill_kernels import arrays
from pagemill_kernels.arrays import Array
from pagemill_kernels.kv_store import kinds
from pagemill_kernels.kv_store.kinds import KVType
from pagemill_models.declaration.caches import StateSpec
from pagemill_models.spec.model_spec import STATE_VALUE_BYTES, ModelSpec
from pagemill_protocol.report.cache_kinds import FULL, CacheKind


class KindBlocks:
    """The blocks of one cache kind, in one array over all of its layers.

    All layers of a block are adjacent, so a layer's blocks are a stride apart. Memory is touched in pages of up to
    2 MiB: the first block costs one such page, not one in every layer. The last block of the array is the padding
    block, which is read and stays zero.
    """

    def __init__(self, pool: Array, shapes: Sequence[tuple[int, ...]], kind: KVType) -> None:
        """`pool`: [blocks, values of a block]. `shapes`: of a block in each layer; `kind`: type of its values."""
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
        max_rows: int = 0,
        most_proposed: int | None = None,
        blocks_beyond: int = 0,
        within: Callable[[], Array] | None = None,
    ) -> None:
        """Allocate the blocks of each of `cache_kinds`. `shares_memory`: whether memory may move between the first and
        the last of them; each then has blocks for all of it. `max_rows`: rows with a log of recurrent layers, which
        have room for `most_proposed` tokens that may be taken back. `blocks_beyond`: those behind the shared memory of
        what drafts tokens, whose part of each block is `beside`. `within`: returns the memory of that part, [blocks +
        1, bytes]; None: this cache has memory of its own."""
        self.cache_kinds = cache_kinds
        self._counts = [num_blocks] if isinstance(num_blocks, int) else list(num_blocks)
        shapes = spec.cache_shapes
        own = tuple(layer for layer, (heads, _) in enumerate(shapes) if heads) or tuple(range(len(shapes)))
        all_layers = () if any(each.layers for each in cache_kinds) else own
        self._layers_of = [each.layers or all_layers for each in cache_kinds]
        self._shares_memory = shares_memory and len(cache_kinds) > 1
        self._block_size = block_size
        self._kind = kind
        has_states = cache_kinds[-1].state
        self._states = {
            layer: each for layer, each in (spec.decoder.caches() if has_states else ()) if isinstance(each, StateSpec)
        }
        self._max_rows, self._most_proposed = max_rows, most_proposed or 0
        self._types: list[KVType] = ["float32" if each.state else kind for each in cache_kinds]
        self._shapes: list[tuple[int, ...]] = [
            (heads, block_size, kinds.token_width(kind, size)) if heads else () for heads, size in shapes
        ]
        self.num_bytes = sum(
            count * block_size * heads * kinds.token_bytes(kind, size)
            for count, layers, each in zip(self._counts, self._layers_of, cache_kinds, strict=True)
            if not each.state
            for heads, size in map(shapes.__getitem__, layers)
        )
        self._within, self._blocks_beyond, self._beside_bytes = within, blocks_beyond, 0
        if self._shares_memory:
            own_bytes = block_size * sum(
                heads * kinds.token_bytes(kind, size) for heads, size in map(shapes.__getitem__, self._layers_of[0])
            )
            self._beside_bytes = cache_kinds[0].block_bytes - own_bytes
            self.num_bytes += self._counts[0] * self._beside_bytes + blocks_beyond * cache_kinds[0].block_bytes
        self.num_bytes *= within is None
        if has_states:
            of_rows = (each.num_row_values(block_size, self._most_proposed) for each in self._states.values())
            num_values = self._counts[-1] * sum(each.num_values for each in self._states.values())
            self.num_bytes += (num_values + max_rows * sum(of_rows)) * STATE_VALUE_BYTES
        self.of_kinds: list[KindBlocks] = []
        self.layers: list[LayerCache] = []
        self.beside: Array = np.zeros((0, 0), dtype=np.uint8)
        """The part of the first kind's blocks that no layer of this cache has, [blocks, bytes]."""
        self.allocate()

    def allocate(self) -> None:
        """Allocate all blocks, filled with zeros. Raises `LoadError` if the memory is too small."""
        if self.num_bytes > memory_limit():
            raise too_large(max(self._counts), self._block_size, self.num_bytes)
        shapes = [
            [(self._states[layer].num_values,) if each.state else self._shapes[layer] for layer in layers]
            for layers, each in zip(self._layers_of, self.cache_kinds, strict=True)
        ]
        dtypes = [np.dtype(kinds.NUMPY_TYPES[each]) for each in self._types]
        widths = [sum(map(math.prod, own)) * dtype.itemsize for own, dtype in zip(shapes, dtypes, strict=True)]
        try:
            if self._within is not None:
                pools = [self._within()]
            else:
                pools = [_lazy_zeros((count + 1, width)) for count, width in zip(self._counts, widths, strict=True)]
            if self._shares_memory:
                pools[0], pools[-1] = self._shared()
            pools = [pool.view(dtype) for pool, dtype in zip(pools, dtypes, strict=True)]
            self.of_kinds = [KindBlocks(*each) for each in zip(pools, shapes, self._types, strict=True)]
            logs = {layer: self._logs_of(each) for layer, each in self._states.items()}
        except MemoryError as error:
            raise too_large(max(self._counts), self._block_size, self.num_bytes) from error
        vectors: dict[int, Array] = {}
        states: dict[int, Array] = {}
        for layers, own, kind in zip(self._layers_of, self.of_kinds, self.cache_kinds, strict=True):
            (states if kind.state else vectors).update(zip(layers, own.layers, strict=True))
        nothing = np.empty(0, dtypes[0])
        self.layers = [vectors.get(layer, nothing) for layer in range(len(self._shapes))]
        for layer, each in self._states.items():
            self.layers[layer] = _state_arrays(each, states[layer], logs[layer])._replace(vectors=vectors.get(layer))

    def _logs_of(self, spec: StateSpec) -> tuple[Array, Array]:
        """Return the logs of all rows of a recurrent layer, and the last inputs of its convolution."""
        log_tokens, num_inputs = self._block_size + self._most_proposed, spec.width - 1 + self._most_proposed
        shapes = (log_tokens, spec.inputs_per_token), (num_inputs, spec.channels)
        values = [_lazy_zeros((self._max_rows * math.prod(shape) * 4,)).view(np.float32) for shape in shapes]
        log, inputs = (each.reshape(self._max_rows, *shape) for each, shape in zip(values, shapes, strict=True))
        return log, inputs

    def _shared(self) -> tuple[Array, Array]:
        """Return the blocks of the first and the last kind, which are in one arena (`pagemill_engine.kv.split`)."""
        low, high = self.cache_kinds[0].block_bytes, self.cache_kinds[-1].block_bytes
        arena = arena_of(self.cache_kinds, self._counts)
        memory = _lazy_zeros((arena.num_bytes + self._blocks_beyond * low,))
        first, last = memory.reshape(-1, low), (arena.padding_blocks[1] + 1) * high
        own, self.beside = np.split(first, [low - self._beside_bytes], axis=1)
        return own[: arena.padding_blocks[0] + 1], memory[arena.start : arena.start + last].reshape(-1, high)

    def release(self) -> None:
        """Return all of its memory to the machine."""
        self.of_kinds, self.layers, self.beside = [], [], np.zeros((0, 0), dtype=np.uint8)


def _state_arrays(spec: StateSpec, blocks: Array, logs: tuple[Array, Array]) -> StateArrays:
    """Return the blocks of a recurrent layer, [slots, values], and its logs as the arrays of a `StateArrays`."""
    states, windows = np.split(blocks, [blocks.shape[1] - spec.num_window_values], axis=1)
    shape = spec.parts[0] if spec.parts else (0,)
    return StateArrays(
        states.reshape(len(blocks), *shape), windows.reshape(len(blocks), spec.width - 1, spec.channels), *logs
    )


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


def _lazy_zeros(shape: tuple[int, ...]) -> Array:
    """Return bytes of zeros that take memory only once they are written, and whose memory is freed with the array."""
    num_bytes = math.prod(shape)
    if not num_bytes:  # no block is kept, and mmap refuses an empty map
        return np.zeros(shape, dtype=np.uint8)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of memory cannot be allocated: {error.strerror}") from error
    with suppress(OSError, AttributeError):
        # A hint, as numpy gives for large arrays: not every kernel supports it.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8).reshape(shape)
