"""The paged KV cache of a torch device, for `executing.device.device_runner`. `kv_cache.KVCache` is the host's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagemill_engine.sizing.kv_sizes import kv_bytes_per_token, too_large
from pagemill_engine.sizing.memory import memory_limit
from pagemill_kernels.gpu.launch import upload
from pagemill_kernels.kv_store import kinds
from pagemill_kernels.kv_store.kinds import KVType
from pagemill_kernels.kv_store.storage import TORCH_TYPES
from pagemill_models.spec.model_spec import ModelSpec


class DeviceKVCache:
    """Keys and values in blocks. `layers[i]`: [num_blocks + 1, cache_heads, block_size, token width], contiguous.

    The layout is in `pagemill_kernels.kv_store`, that of quantized caches in its `storage`. `layers` is empty between
    `release` and `allocate`. The block after the last one is the padding block: padded rows write it and it is never
    read. Raises `LoadError` if the device does not have the memory.
    """

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int, kind: KVType, device: torch.device) -> None:
        self.device = device
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._dtype = TORCH_TYPES[kind]
        self._block_shape = (spec.cache_heads, block_size, kinds.token_width(kind, spec.head_dim))
        self._num_layers = spec.num_layers
        self._block_bytes = block_size * kv_bytes_per_token(spec, kind)
        self.layers: list[Tensor] = []
        self.allocate()

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self._block_bytes

    @property
    def padding_block(self) -> int:
        return self.num_blocks

    def allocate(self) -> None:
        """Allocate all blocks, filled with zeros. Raises `LoadError` if the memory is too small."""
        if self.device.type == "cpu" and self.num_bytes > memory_limit():
            raise too_large(self.num_blocks, self._block_size, self.num_bytes)
        shape = (self.num_blocks + 1, *self._block_shape)
        try:
            for _ in range(self._num_layers):
                self.layers.append(torch.zeros(shape, dtype=self._dtype, device=self.device))
        except (MemoryError, torch.OutOfMemoryError) as error:
            self.release()
            raise too_large(self.num_blocks, self._block_size, self.num_bytes) from error

    def resize(self, num_blocks: int) -> None:
        """Allocate `num_blocks` blocks instead, filled with zeros. Raises `LoadError` if the memory is too small."""
        self.release()
        self.num_blocks = num_blocks
        self.allocate()

    def release(self) -> None:
        """Return all of its memory to the device."""
        self.layers.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks by (source, destination) pairs. Every source is read before any destination is written."""
        if not copies:
            return
        sources, destinations = upload(np.array(copies, dtype=np.int64).T, self.device)
        for cache in self.layers:
            cache[destinations] = cache[sources]
