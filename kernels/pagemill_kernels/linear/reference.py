"""The formula of linear layers, over the unpacked weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class PlainLinear:
    can_gather = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        out.add_(self(x))

    def gather(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._weight)


def pack_linear(weight: Tensor, bias: Tensor | None) -> PlainLinear:
    """Return a layer that keeps the weight without copying it. weight: [out, in]; bias: [out]."""
    return PlainLinear(weight, bias)


def pack_rows(table: Tensor) -> PlainLinear:
    """Return a layer for reading rows of a matrix [rows, size], which is kept without a copy."""
    return PlainLinear(table, None)
