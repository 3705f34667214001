"""The formula, over the weight as it is."""

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
    """weight: [out, in]; bias: [out]. The weight is kept, not copied."""
    return PlainLinear(weight, bias)


def pack_rows(table: Tensor) -> PlainLinear:
    """A matrix [rows, size] that only gives rows; kept, not copied."""
    return PlainLinear(table, None)
