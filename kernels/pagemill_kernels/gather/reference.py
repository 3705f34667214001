"""The formula of gathering."""

from __future__ import annotations

from torch import Tensor


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Return a new tensor [n, size]. table: [rows, size]; ids: int64 [n], each below rows."""
    return table.index_select(0, ids)
