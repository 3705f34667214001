"""The adapters of all slots on a device: tensors that keep their addresses, so that captured graphs read them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagemill_execution.runners.row_adapters import HeldAdapters, RowAdapters
from pagemill_kernels.adapters.triton_launch import AdapterStack, TritonAdapterRows, empty_stack
from pagemill_kernels.arrays import Array
from pagemill_kernels.gpu.launch import upload
from pagemill_models.declaration.declaration import DecoderSpec, LatentAttentionSpec
from pagemill_models.sharding.linears import LinearUse, linears

if TYPE_CHECKING:
    from pagemill_execution.adapters.packing import Packed


class DeviceTables:
    def __init__(self, decoder: DecoderSpec, num_slots: int, max_rank: int, dtype: torch.dtype, device: Any) -> None:
        """Allocate slots of zeros. `max_rank`: of all adapters."""
        self._device = device
        self.is_capturable = not any(
            isinstance(block, LatentAttentionSpec) for layer in decoder.layers for block in layer.blocks()
        )
        """Whether graphs may contain adapters: latent attention reads on the host which rows have them."""
        self._stacks: dict[int, AdapterStack] = {}
        self._places: dict[int, tuple[AdapterStack, int]] = {}
        uses = [use for use in linears(decoder) if use.role != "classifier"]
        for _, found in groupby(sorted(uses, key=_matrix), key=_matrix):
            same = list(found)
            first = same[0]
            ins, outs = first.spec.in_features, first.spec.out_features
            if first.role == "embedding":  # A has a column for each token, B a row for each value
                ins, outs = outs, ins
            rank = max_rank * len(first.spec.parts)  # each stored matrix has an A of its own
            stack = empty_stack(num_slots, len(same), rank, ins, outs, dtype, device)
            self._stacks[first.number] = stack
            self._places |= {use.number: (stack, index) for index, use in enumerate(same)}
        self._placed: dict[int, list[int]] = {}

    def place(self, slot: int, packed: Packed) -> None:
        """Replace the adapter of a slot. The device runs copies behind the steps that were queued before."""
        for number in self._placed.get(slot, ()):
            for values in self._of(slot, number):
                values.zero_()
        for number, matrices in packed.items():
            a, b = self._of(slot, number)
            rank = len(matrices.a)
            a[:rank].copy_(matrices.a)
            b[:, :rank].copy_(matrices.b)
        self._placed[slot] = list(packed)

    def rows(self, slots: Array) -> TritonAdapterRows:
        return self.on_device(self.upload(slots))

    def upload(self, slots: Array) -> Tensor:
        return upload(slots, self._device, torch.int64)

    def on_device(self, slots: Tensor) -> TritonAdapterRows:
        """Return the adapters of rows whose slots are on the device."""
        return TritonAdapterRows(slots, self._stacks)

    def empty_slots(self, num_rows: int) -> Tensor:
        return torch.full((num_rows,), -1, dtype=torch.int64, device=self._device)

    def _of(self, slot: int, number: int) -> Iterator[Tensor]:
        stack, index = self._places[number]
        at = slot * stack.experts + index
        return iter((stack.a[at], stack.b[at]))


class DeviceAdapters(RowAdapters):
    """The adapters of a device's rows, which include the padding row."""

    def __init__(self, store: HeldAdapters, tables: DeviceTables, max_num_seqs: int) -> None:
        super().__init__(store, tables, max_num_seqs + 1)
        self.tables = tables


def _matrix(use: LinearUse) -> tuple[int, int]:
    """Return what the same matrix of all experts of a layer has in common: the first one's number."""
    return (use.number, 0) if use.expert is None else (use.number - 2 * use.expert, 1)
