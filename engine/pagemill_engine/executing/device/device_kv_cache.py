"""The paged KV cache of a torch device, for `executing.device.device_runner`. `kv_cache.KVCache` is the host's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagemill_engine.sizing.kv_sizes import too_large
from pagemill_engine.sizing.memory import memory_limit
from pagemill_kernels.gpu.launch import upload
from pagemill_kernels.kv_store import kinds
from pagemill_kernels.kv_store.kinds import KVType
from pagemill_kernels.kv_store.storage import TORCH_TYPES
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_protocol.report.cache_kinds import FULL, CacheKind, kinds_of_windows


class DeviceKVCache:
    """Keys and values in blocks. `layers[i]`: [blocks of its kind + 1, cache_heads, block_size, token width],
    contiguous.

    The layout is in `pagemill_kernels.kv_store`, that of quantized caches in its `storage`. `layers` is empty between
    `release` and `allocate`. The block after the last one of a kind is its padding block: padded rows write it and it
    is never read. Raises `LoadError` if the device does not have the memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        counts: Sequence[int],
        block_size: int,
        kind: KVType,
        device: torch.device,
        cache_kinds: Sequence[CacheKind] = (FULL,),
    ) -> None:
        """Allocate the blocks of each of `cache_kinds`."""
        self.device, self.kind = device, kind
        self._block_size = block_size
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

    @property
    def padding_blocks(self) -> Sequence[int]:
        """The index of the padding block of each kind."""
        return self.counts

    def allocate(self) -> None:
        """Allocate all blocks, filled with zeros. Raises `LoadError` if the memory is too small."""
        if self.device.type == "cpu" and self.num_bytes > memory_limit():
            raise too_large(max(self.counts), self._block_size, self.num_bytes)
        try:
            for number, shape in zip(self._kind_of_layer, self._block_shapes, strict=True):
                blocks = torch.zeros(self.counts[number] + 1, *shape, dtype=self._dtype, device=self.device)
                self.layers.append(blocks)
        except (MemoryError, torch.OutOfMemoryError) as error:
            self.release()
            raise too_large(max(self.counts), self._block_size, self.num_bytes) from error

    def resize(self, counts: Sequence[int], cache_kinds: Sequence[CacheKind]) -> None:
        """Allocate the blocks of each of `cache_kinds` instead, filled with zeros. Raises `LoadError` if the memory is
        too small."""
        self.release()
        self.counts = counts
        self.kind_of = kinds_of_windows(cache_kinds, self._windows)
        """The number of the kind of the layers with each window."""
        numbers = {layer: number for number, each in enumerate(cache_kinds) for layer in each.layers}
        self._kind_of_layer = [numbers.get(layer, 0) for layer in range(len(self._block_shapes))]
        self.allocate()

    def release(self) -> None:
        """Return all of its memory to the device."""
        self.layers.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def copy_blocks(self, kind: int, copies: list[tuple[int, int]]) -> None:
        """Copy blocks of a kind by (source, destination) pairs. Every source is read before any destination is
        written."""
        if not copies:
            return
        sources, destinations = upload(np.array(copies, dtype=np.int64).T, self.device)
        layers = zip(self.layers, self._kind_of_layer, strict=True)
        for cache in [layer for layer, number in layers if number == kind]:
            cache[destinations] = cache[sources]
