"""Linear layers over weights in oneDNN's blocked layout: 1.5 to 2 times the speed of `F.linear` at 8 to 64 rows.

The packed weight replaces the plain one: the caller drops its reference after packing. If torch was built without
oneDNN, or oneDNN does not support the type on this CPU, the reference runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill_kernels.linear import reference
from pagemill_kernels.linear.packed import PackedLinear

PACK_ROWS = 64
"""Rows of x for which the packed layout is chosen; other row counts use the same layout."""


class TorchOneDNNLinear:
    can_gather = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self.num_bytes: int = torch.ops.mkldnn._nbytes(self._packed)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._linear(x, self._packed, self._bias, "none", [], "")
        return result

    def add_to(self, out: Tensor, x: Tensor) -> None:
        out.add_(self(x))

    def gather(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("oneDNN's blocked layout is opaque")


def pack_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Pack a weight. weight: [out, in]; bias: [out]."""
    return TorchOneDNNLinear(weight, bias) if can_pack(weight.dtype) else reference.pack_linear(weight, bias)


def can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32
