"""The paged KV cache of a torch device, for `runners.device.device_runner`. `kv_cache.KVCache` is the host's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from pagemill_execution.arena import Arena, arena_of
from pagemill_execution.decoders.on_torch.context import StateTensors
from pagemill_execution.sizing.kv_sizes import too_large
from pagemill_execution.sizing.memory import memory_limit
from pagemill_kernels.gpu.launch import upload
from pagemill_kernels.kv_store import kinds
from pagemill_kernels.kv_store.kinds import KVType
from pagemill_kernels.kv_store.storage import TORCH_TYPES
from pagemill_models.declaration.caches import StateSpec
from pagemill_models.spec.model_spec import STATE_VALUE_BYTES, ModelSpec
from pagemill_protocol.report.cache_kinds import FULL, CacheKind, kinds_of_windows


class DeviceKVCache:
    """Keys and values in blocks. `layers[i]`: [blocks of its kind + 1, cache_heads, block_size, token width], each
    block contiguous; of a recurrent layer `StateTensors`, with logs of all rows.

    The layout is in `pagemill_kernels.kv_store`, that of quantized caches in its `storage`. `layers` is empty between
    `release` and `allocate`. The block after the last one of a kind is its padding block: padded rows write it and it
    is never read; of states it is read and stays zero. Of several kinds the first and the last share one arena
    (`pagemill_engine.kv.split`), in which the blocks of all layers of a kind are adjacent. Raises `LoadError` if the
    device does not have the memory.
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
        max_rows: int = 0,
        most_proposed: int | None = None,
    ) -> None:
        """Allocate the blocks of each of `cache_kinds`. `first_layer`: of a rank's part of a model, whose kinds those
        are; the kinds of a part share no memory, since other parts have other bytes. `max_rows`: rows with a log of
        recurrent layers, which have room for `most_proposed` tokens that may be taken back."""
        self.device, self.kind = device, kind
        self._block_size = block_size
        self._first_layer, self._shares = first_layer or 0, first_layer is None
        self._dtype = TORCH_TYPES[kind]
        shapes = spec.cache_shapes
        self._block_shapes = [(heads, block_size, kinds.token_width(kind, size)) for heads, size in shapes]
        self._block_bytes = [block_size * heads * kinds.token_bytes(kind, size) for heads, size in shapes]
        self._windows = spec.decoder.windows()
        self._max_rows = max_rows
        has_states = cache_kinds[-1].state
        self._states = {
            layer: each for layer, each in (spec.decoder.caches() if has_states else ()) if isinstance(each, StateSpec)
        }
        self.layers: list[Tensor | StateTensors] = []
        self.resize(counts, cache_kinds, most_proposed)

    @property
    def num_bytes(self) -> int:
        of_blocks = sum(self.counts[number] * self._bytes_of(number, layer) for number, layer in self._places())
        return of_blocks + sum(math.prod(shape) for shapes in self._log_shapes.values() for shape in shapes) * 4

    def allocate(self) -> None:
        """Allocate all blocks, filled with zeros. Raises `LoadError` if the memory is too small."""
        if self.device.type == "cpu" and self.num_bytes > memory_limit():
            raise too_large(max(self.counts), self._block_size, self.num_bytes)
        try:
            found = {} if self._arena is None else self._in_arena(self._arena)
            for place in self._places():
                self._blocks[place] = found[place] if place in found else self._own_blocks(*place)
            vectors = {layer: each for (number, layer), each in self._blocks.items() if not self._is_state[number]}
            for layer, shape in enumerate(self._block_shapes):
                own = vectors.get(layer)
                if layer in self._states:
                    self.layers.append(self._state_tensors(layer, own))
                else:
                    self.layers.append(self._zeros(1, *shape, dtype=self._dtype) if own is None else own)
        except (MemoryError, torch.OutOfMemoryError) as error:
            self.release()
            raise too_large(max(self.counts), self._block_size, self.num_bytes) from error

    def _places(self) -> Iterator[tuple[int, int]]:
        """Yield the kinds' numbers and the layers that have blocks of them."""
        for number, layers in enumerate(self._layers_of):
            yield from ((number, layer) for layer in layers)

    def _bytes_of(self, number: int, layer: int) -> int:
        """Return the bytes that a layer has of a block."""
        return (
            self._states[layer].num_values * STATE_VALUE_BYTES if self._is_state[number] else self._block_bytes[layer]
        )

    def _shape_of(self, number: int, layer: int) -> tuple[int, ...]:
        return (self._states[layer].num_values,) if self._is_state[number] else self._block_shapes[layer]

    def _type_of(self, number: int) -> torch.dtype:
        return torch.float32 if self._is_state[number] else self._dtype

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _own_blocks(self, number: int, layer: int) -> Tensor:
        return self._zeros(self.counts[number] + 1, *self._shape_of(number, layer), dtype=self._type_of(number))

    def _state_tensors(self, layer: int, vectors: Tensor | None) -> StateTensors:
        spec = self._states[layer]
        blocks = self._blocks[len(self.counts) - 1, layer]
        states, windows = torch.split(blocks, [blocks.shape[1] - spec.num_window_values, spec.num_window_values], 1)
        log, inputs = (self._zeros(*shape) for shape in self._log_shapes[layer])
        # Views: blocks are a stride apart, so their values need no copy.
        states = states.view(len(blocks), *(spec.parts[0] if spec.parts else (0,)))
        windows = windows.view(len(blocks), spec.width - 1, spec.channels)
        return StateTensors(states, windows, log, inputs, vectors)

    def _in_arena(self, arena: Arena) -> dict[tuple[int, int], Tensor]:
        """Return the blocks of the layers of the first and the last kind: views of one tensor."""
        memory, found = self._zeros(arena.num_bytes, dtype=torch.uint8), {}
        for number, start, padding in zip(
            (0, len(self.counts) - 1), (0, arena.start), arena.padding_blocks, strict=True
        ):
            dtype, layers = self._type_of(number), self._layers_of[number]
            values, item = memory.view(dtype), dtype.itemsize
            width, at = sum(self._bytes_of(number, layer) for layer in layers) // item, start // item
            for layer in layers:
                shape = self._shape_of(number, layer)
                strides = [math.prod(shape[index + 1 :]) for index in range(len(shape))]
                found[number, layer] = values.as_strided((padding + 1, *shape), (width, *strides), at)
                at += self._bytes_of(number, layer) // item
        return found

    def resize(self, counts: Sequence[int], cache_kinds: Sequence[CacheKind], most_proposed: int | None = None) -> None:
        """Allocate the blocks of each of `cache_kinds` instead, filled with zeros, and logs unless there is no block.
        Raises `LoadError` if the memory is too small."""
        self.release()
        self.counts = counts
        self.kind_of = kinds_of_windows(cache_kinds, self._windows)
        """The number of the kind of the layers with each window."""
        self._is_state = [kind.state for kind in cache_kinds]
        self._layers_of = self._divided(cache_kinds)
        rows, most = self._max_rows if any(counts) else 0, max(1, most_proposed or 0)
        self._log_shapes = {
            layer: (
                (rows, self._block_size + most, spec.inputs_per_token),
                (rows, spec.width - 1 + most, spec.channels),
            )
            for layer, spec in self._states.items()
        }
        """Of each recurrent layer, the shapes of its rows' logs and last inputs."""
        self._arena = arena_of(cache_kinds, counts) if self._shares and len(cache_kinds) > 1 else None
        self.padding_blocks = list(counts)
        """The index of the padding block of each kind."""
        if self._arena is not None:
            self.padding_blocks[0], self.padding_blocks[-1] = self._arena.padding_blocks
        self.allocate()

    def _divided(self, cache_kinds: Sequence[CacheKind]) -> list[list[int]]:
        """Return the layers of each kind; those with vectors that no kind names are of the first one."""
        num_layers = len(self._block_shapes)
        named = [[layer - self._first_layer for layer in kind.layers] for kind in cache_kinds]
        found = [[layer for layer in layers if 0 <= layer < num_layers] for layers in named]
        if self._is_state[0]:
            return found
        others = {layer for layers, state in zip(found, self._is_state, strict=True) if not state for layer in layers}
        found[0] += [layer for layer in range(num_layers) if layer not in others and self._block_shapes[layer][0]]
        found[0].sort()
        return found

    def zero_padding(self) -> None:
        """Clear the padding blocks of keys and values; nothing writes those of states."""
        for (number, _), blocks in self._blocks.items():
            if not self._is_state[number]:
                blocks[-1].zero_()

    def release(self) -> None:
        """Return all of its memory to the device."""
        self.layers.clear()
        self._blocks: dict[tuple[int, int], Tensor] = {}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def copy_blocks(self, copies: Sequence[list[tuple[int, int]]]) -> None:
        """Copy blocks of each kind by (source, destination) pairs. Every source is read before any destination is
        written: kinds may share memory."""
        if not any(copies):
            return
        pairs = [upload(np.array(each, dtype=np.int64).T, self.device) if each else None for each in copies]
        contents = []
        for (number, _), cache in self._blocks.items():
            if (pair := pairs[number]) is not None:
                sources, destinations = pair
                contents.append((cache, destinations, cache[sources]))
        for cache, destinations, values in contents:
            cache[destinations] = values
