"""The paged KV cache of one device: the tensors, copies between blocks, and how long a request it can hold."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_engine.config import EngineConfig
from pagemill_engine.loading.errors import LoadError
from pagemill_engine.runner.budget import keeps_nothing
from pagemill_engine.runner.memory import memory_limit
from pagemill_kernels.gpu.launch import upload
from pagemill_kernels.kv_store import storage
from pagemill_protocol.model_spec import ModelSpec

CPU = torch.device("cpu")


class KVCache:
    """`layers[i]`: [num_blocks + 1, cache_heads, block_size, head_dim]; layout in `pagemill_kernels.kv_store`,
    quantized ones in its `storage`. `rows[i]`: what kernels take, contiguous, where `rows_of` gives a block's row. Both
    are empty between `release` and `allocate`.

    `by_block`: all layers of a block are adjacent, else all blocks of a layer are, and rows are blocks. Memory is
    touched in pages of up to 2 MiB: the first block costs one such page, not one in every layer.

    The block after the last one is the padding block. On a CPU padded rows read it and it stays zero; on a GPU padded
    rows write it and it is never read. Raises `LoadError` if the machine does not have the memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        *,
        by_block: bool = False,
    ) -> None:
        self.device = device
        self.num_blocks = num_blocks
        self.padding_block = num_blocks
        self._by_block = by_block
        self._block_size = block_size
        self._dtype = dtype
        self._shape = (num_blocks + 1, spec.cache_heads, block_size, storage.token_width(dtype, spec.head_dim))
        self._num_layers = spec.num_layers
        self._block_bytes = block_size * kv_bytes_per_token(spec, dtype)
        self.num_bytes = num_blocks * self._block_bytes
        self.layers: list[Tensor] = []
        self.rows: list[Tensor] = [] if by_block else self.layers
        self.allocate()

    def allocate(self) -> None:
        """All zeros. Raises `LoadError`."""
        if self.device.type == "cpu" and self.num_bytes > memory_limit():
            raise _too_large(self.num_blocks, self._block_size, self.num_bytes)
        try:
            self._lay_out()
        except (MemoryError, torch.OutOfMemoryError) as error:
            self.release()
            raise _too_large(self.num_blocks, self._block_size, self.num_bytes) from error

    def resize(self, num_blocks: int) -> None:
        """All zeros. Raises `LoadError`."""
        self.release()
        self.num_blocks = self.padding_block = num_blocks
        self.num_bytes = num_blocks * self._block_bytes
        self._shape = (num_blocks + 1, *self._shape[1:])
        self.allocate()

    def release(self) -> None:
        """Give all of its memory back, to the machine or to the device."""
        self.layers.clear()
        self.rows.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def padding_row(self) -> int:
        return self.padding_block * self._num_layers if self._by_block else self.padding_block

    def rows_of(self, block_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return block_ids * self._num_layers if self._by_block else block_ids

    def row_slots_of(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """From block id * block_size + offset to row * block_size + offset."""
        if not self._by_block:
            return slots
        return slots + slots // self._block_size * (self._block_size * (self._num_layers - 1))

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """(source, destination) pairs; every source is read before any destination is written."""
        if not copies:
            return
        sources, destinations = upload(np.array(copies, dtype=np.int64).T, self.device)
        for cache in self.layers:
            cache[destinations] = cache[sources]

    def scrub(self, block_ids: Tensor) -> None:
        """Replace non-finite values by 0, so that a failed request leaves nothing that padding could pick up."""
        for cache in self.layers:
            # Codes are always finite, their scales are not.
            values = storage.scales(cache) if cache.dtype in storage.LARGEST_CODES else cache
            values[block_ids] = values[block_ids].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _lay_out(self) -> None:
        if not self._by_block:
            self.layers += [_zeros(self._shape, self._dtype, self.device) for _ in range(self._num_layers)]
            return
        num_blocks, *head_shape = self._shape
        pool = _zeros((num_blocks * self._num_layers, *head_shape), self._dtype, self.device)
        self.rows += [pool[layer:] for layer in range(self._num_layers)]
        self.layers += pool.view(num_blocks, self._num_layers, *head_shape).unbind(1)


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of keys and values, or latents, that one token takes over all layers, scales included."""
    return spec.num_layers * spec.cache_heads * storage.token_bytes(dtype, spec.head_dim)


def _whole_prompts_for(config: EngineConfig, spec: ModelSpec) -> int:
    """A step computes whole prompts."""
    most, step_tokens = spec.max_position_embeddings, config.step.max_num_batched_tokens
    wanted = config.max_model_len
    if wanted is None:
        return min(most, step_tokens)
    if wanted > min(most, step_tokens):
        limit, remedy = (most, "Lower maxModelLen") if wanted > most else (step_tokens, "Raise maxNumBatchedTokens")
        what = "the model was made for" if wanted > most else "its prompts are computed whole, and a step may have"
        raise LoadError("MaxModelLenTooLarge", f"maxModelLen is {wanted}, but {what} {limit} tokens. {remedy}.")
    return wanted


def _too_large(num_blocks: int, block_size: int, num_bytes: int) -> LoadError:
    return LoadError(
        "KVCacheTooLarge",
        f"The KV cache of {num_blocks} blocks of {block_size} tokens takes {num_bytes / 1024**3:.1f} GiB, "
        "more memory than this machine, container or device gives. Lower kvCacheMemory.",
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _untouched_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that cost memory only once they are written, in pages of their own: with the tensor the memory is gone."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:  # nothing is kept, and no page may be empty
        return torch.zeros(shape, dtype=dtype)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of memory are not given: {error.strerror}") from error
    with suppress(OSError, AttributeError):
        # A hint, as for all large arrays of numpy: not every kernel has them.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(pages, dtype=np.uint8)).view(dtype).view(shape)


def max_model_len_for(config: EngineConfig, spec: ModelSpec, num_blocks: int) -> int:
    """Tokens that one request may have. Raises `LoadError` when the setting asks for more than model or cache hold."""
    cache_tokens = num_blocks * config.block_size
    wanted = config.max_model_len
    if keeps_nothing(spec):
        return _whole_prompts_for(config, spec)
    if wanted is None:
        return min(spec.max_position_embeddings, cache_tokens)
    if wanted > spec.max_position_embeddings:
        raise LoadError(
            "MaxModelLenTooLarge",
            f"maxModelLen is {wanted}, but the model was made for {spec.max_position_embeddings} tokens. "
            "Lower maxModelLen.",
        )
    if wanted > cache_tokens:
        raise LoadError(
            "MaxModelLenTooLarge",
            f"maxModelLen is {wanted}, but the KV cache holds {cache_tokens} tokens ({num_blocks} blocks of "
            f"{config.block_size}). Lower maxModelLen or raise kvCacheMemory.",
        )
    return wanted
