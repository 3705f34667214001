"""The paged KV cache of a torch device, for `runners.device.device_runner`. `kv_cache.KVCache` is the host's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagemill_execution.arena import Arena, arena_of
from pagemill_execution.sizing.kv_sizes import too_large
from pagemill_execution.sizing.memory import memory_limit
from pagemill_kernels.gpu.launch import upload
from pagemill_kernels.kv_store import kinds
from pagemill_kernels.kv_store.kinds import KVType
from pagemill_kernels.kv_store.storage import TORCH_TYPES
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_protocol.report.cache_kinds import FULL, CacheKind, kinds_of_windows


class DeviceKVCache:
    """Keys and values in blocks. `layers[i]`: [blocks of its kind + 1, cache_heads, block_size, token width], each
    block contiguous.

    The layout is in `pagemill_kernels.kv_store`, that of quantized caches in its `storage`. `layers` is empty between
    `release` and `allocate`. The block after the last one of a kind is its padding block: padded rows write it and it
    is never read. Of several kinds the first and the last share one arena (`pagemill_engine.kv.split`), in which the
    blocks of all layers of a kind are adjacent. Raises `LoadError` if the device does not have the memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        counts: Sequence[int],
        block_size: int,
        kind: KVType,
        device: torch.device,
        cache_kinds: Sequence[CacheKind] = (FULL,),
        first_layer: int | None = None,
    ) -> None:
        """Allocate the blocks of each of `cache_kinds`. `first_layer`: of a rank's part of a model, whose kinds those
        are; the kinds of a part share no memory, since other parts have other bytes."""
        self.device, self.kind = device, kind
        self._block_size = block_size
        self._first_layer, self._shares = first_layer or 0, first_layer is None
        self._dtype = TORCH_TYPES[kind]
        shapes = spec.cache_shapes
        self._block_shapes = [(heads, block_size, kinds.token_width(kind, size)) for heads, size in shapes]
        self._block_bytes = [block_size * heads * kinds.token_bytes(kind, size) for heads, size in shapes]
        self._windows = spec.decoder.windows()
        self.layers: list[Tensor] = []
        self.resize(counts, cache_kinds)

    @property
    def num_bytes(self) -> int:
        of_layers = zip(self._kind_of_layer, self._block_bytes, strict=True)
        return sum(self.counts[number] * block_bytes for number, block_bytes in of_layers)

    def allocate(self) -> None:
        """Allocate all blocks, filled with zeros. Raises `LoadError` if the memory is too small."""
        if self.device.type == "cpu" and self.num_bytes > memory_limit():
            raise too_large(max(self.counts), self._block_size, self.num_bytes)
        try:
            found = {} if self._arena is None else self._in_arena(self._arena)
            for layer, number in enumerate(self._kind_of_layer):
                self.layers.append(found[layer] if layer in found else self._blocks(layer, self.counts[number]))
        except (MemoryError, torch.OutOfMemoryError) as error:
            self.release()
            raise too_large(max(self.counts), self._block_size, self.num_bytes) from error

    def _blocks(self, layer: int, count: int) -> Tensor:
        return torch.zeros(count + 1, *self._block_shapes[layer], dtype=self._dtype, device=self.device)

    def _in_arena(self, arena: Arena) -> dict[int, Tensor]:
        """Return the blocks of the layers of the first and the last kind: views of one tensor."""
        memory = torch.zeros(arena.num_bytes, dtype=torch.uint8, device=self.device).view(self._dtype)
        item, found = self._dtype.itemsize, {}
        last = len(self.counts) - 1
        for number, start, padding in zip((0, last), (0, arena.start), arena.padding_blocks, strict=True):
            layers = [layer for layer, kind in enumerate(self._kind_of_layer) if kind == number]
            width = sum(self._block_bytes[layer] for layer in layers) // item
            at = start // item
            for layer in layers:
                shape = self._block_shapes[layer]
                strides = (width, shape[1] * shape[2], shape[2], 1)
                found[layer] = memory.as_strided((padding + 1, *shape), strides, at)
                at += self._block_bytes[layer] // item
        return found

    def resize(self, counts: Sequence[int], cache_kinds: Sequence[CacheKind]) -> None:
        """Allocate the blocks of each of `cache_kinds` instead, filled with zeros. Raises `LoadError` if the memory is
        too small."""
        self.release()
        self.counts = counts
        self.kind_of = kinds_of_windows(cache_kinds, self._windows)
        """The number of the kind of the layers with each window."""
        numbers = {
            layer - self._first_layer: number for number, each in enumerate(cache_kinds) for layer in each.layers
        }
        self._kind_of_layer = [numbers.get(layer, 0) for layer in range(len(self._block_shapes))]
        self._arena = arena_of(cache_kinds, counts) if self._shares and len(cache_kinds) > 1 else None
        self.padding_blocks = list(counts)
        """The index of the padding block of each kind."""
        if self._arena is not None:
            self.padding_blocks[0], self.padding_blocks[-1] = self._arena.padding_blocks
        self.allocate()

    def release(self) -> None:
        """Return all of its memory to the device."""
        self.layers.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def copy_blocks(self, copies: Sequence[list[tuple[int, int]]]) -> None:
        """Copy blocks of each kind by (source, destination) pairs. Every source is read before any destination is
        written: kinds may share memory."""
        if not any(copies):
            return
        pairs = [upload(np.array(each, dtype=np.int64).T, self.device) if each else None for each in copies]
        contents = []
        for cache, number in zip(self.layers, self._kind_of_layer, strict=True):
            if (pair := pairs[number]) is not None:
                sources, destinations = pair
                contents.append((cache, destinations, cache[sources]))
        for cache, destinations, values in contents:
            cache[destinations] = values
