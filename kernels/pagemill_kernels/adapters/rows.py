"""The interface of a step's adapters to the layers that torch runs; `reference` has the formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from pagemill_kernels.adapters.reference import AdapterMatrices


class AdapterRows(Protocol):
    def add_to(self, number: int, out: Tensor, x: Tensor) -> None:
        """Add to the outputs of linear layer `number`, [rows, out], what adapters make of its inputs, [rows, in]."""
        ...

    def add_to_many(self, first: int, experts: Tensor, out: Tensor, x: Tensor, rows: Tensor) -> None:
        """Add like `add_to` to the outputs of experts. `first`: number of the first expert's layer; those of the others
        are two apart. experts, rows: int64 [count], the expert and the step's row of each of `out` and `x`."""
        ...

    def add_rows(self, number: int, out: Tensor, ids: Tensor) -> None:
        """Add to the embeddings of tokens, [rows, size]; a negative id gets nothing."""
        ...

    def matrices(self, number: int) -> Iterator[tuple[Tensor, AdapterMatrices]]:
        """Yield the rows of each adapter that has matrices for the layer, and these matrices, for products that are
        multiplied into others."""
        ...


class ExpertRows(NamedTuple):
    """A step's adapters for the experts of one layer."""

    adapters: AdapterRows
    first: int
    """Number of the first expert's first matrix; an expert's two are adjacent, and those of experts follow in order."""

    def add_up(self, out: Tensor, x: Tensor, experts: Tensor, rows: Tensor) -> None:
        """Add to the outputs of the experts' first matrices, [count, out].

        x: [count, in]; experts, rows: int64 [count], the expert and the step's row of each.
        """
        self.adapters.add_to_many(self.first, experts, out, x, rows)

    def add_down(self, out: Tensor, x: Tensor, experts: Tensor, rows: Tensor) -> None:
        """Add to the outputs of the second matrices. Arguments: as for `add_up`."""
        self.adapters.add_to_many(self.first + 1, experts, out, x, rows)
