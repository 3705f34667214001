"""The formulas: one adapter after another, in float32 whatever the types of rows and matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class AdapterMatrices(NamedTuple):
    """What an adapter adds to one linear layer: B (A x)."""

    a: Tensor
    """[rank, in]."""
    b: Tensor
    """[out, rank], multiplied by the adapter's scale, its rows in the order of the packed layer's outputs."""


Loaded = Mapping[int, Mapping[int, AdapterMatrices]]
"""By the slot of an adapter, then by the number of a linear layer."""


class PlainAdapterRows:
    """The adapters of a step's rows. Layers without an entry of a row's adapter get nothing."""

    def __init__(self, slots: Tensor, loaded: Loaded) -> None:
        """`slots`: int64 [rows], the slot of each row's adapter, or -1."""
        self._slots, self._loaded = slots, loaded

    def add_to(self, number: int, out: Tensor, x: Tensor) -> None:
        """Add to the outputs of linear layer `number`, [rows, out], what adapters make of its inputs, [rows, in]."""
        for found, matrices in self.matrices(number):
            _add(found, matrices, out, x)

    def add_to_many(self, first: int, experts: Tensor, out: Tensor, x: Tensor, rows: Tensor) -> None:
        """Add like `add_to` to the outputs of experts. `first`: number of the first expert's layer; those of the others
        are two apart. experts, rows: int64 [count], the expert and the step's row of each of `out` and `x`."""
        slots = self._slots[rows]
        for expert in sorted(set(experts.tolist())):
            for slot, matrices in self._of(first + 2 * expert):
                _add(torch.nonzero((experts == expert) & (slots == slot))[:, 0], matrices, out, x)

    def add_rows(self, number: int, out: Tensor, ids: Tensor) -> None:
        """Add to the embeddings of tokens, [rows, size]; a negative id gets nothing."""
        for found, matrices in self.matrices(number):
            own = found[ids[found] >= 0]
            shrunk = matrices.a.float().T[ids[own]]
            out.index_add_(0, own, (shrunk @ matrices.b.float().T).to(out.dtype))

    def matrices(self, number: int) -> Iterator[tuple[Tensor, AdapterMatrices]]:
        """Yield the rows of each adapter that has matrices for the layer, and these matrices."""
        for slot, matrices in self._of(number):
            found = torch.nonzero(self._slots == slot)[:, 0]
            if len(found):
                yield found, matrices

    def _of(self, number: int) -> Iterator[tuple[int, AdapterMatrices]]:
        for slot, loaded in self._loaded.items():
            if number in loaded:
                yield slot, loaded[number]


def _add(found: Tensor, matrices: AdapterMatrices, out: Tensor, x: Tensor) -> None:
    shrunk = x[found].float() @ matrices.a.float().T
    out.index_add_(0, found, (shrunk @ matrices.b.float().T).to(out.dtype))
