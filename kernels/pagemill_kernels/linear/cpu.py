"""Linear layers over weights in oneDNN's blocked layout: 1.5 to 2 times the speed of `F.linear` at 8 to 64 rows.

The packed weight replaces the plain one: the caller drops its reference after packing. Where torch was built without
oneDNN, or oneDNN does not know the type on this CPU, the reference runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagemill_kernels.linear import reference

PACK_ROWS = 64
"""Rows of x that the packed layout is chosen for; other row counts use the same layout."""


def pack_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """weight: [out, in]; bias: [out]. Returns a function of x: [tokens, in] -> [tokens, out]."""
    if not can_pack(weight.dtype):
        return reference.pack_linear(weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
    linear = torch.ops.mkldnn._linear_pointwise.default

    def apply(x: Tensor) -> Tensor:
        result: Tensor = linear(x, packed, bias, "none", [], "")
        return result

    return apply


def can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32
