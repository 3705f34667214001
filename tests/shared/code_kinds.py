"""Kinds of quantized weights of native linear layers, and checks that apply to every layer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pagemill_kernels.cpu import launch
from pagemill_kernels.linear.groups import GroupCodes
from pagemill_kernels.torch_arrays import from_torch, to_torch
from pagemill_kernels.torch_ops import TorchLinear

KINDS = {
    "codes4": (4, 32, True),
    "codes8": (8, 32, False),
    "codes8 offsets": (8, 32, True),
    "codes8 groups of 16": (8, 16, False),
    "codes8 groups of 16 offsets": (8, 16, True),
}
"""Bits, group size, and whether there are offsets."""


def check_threads_change_nothing(linear: TorchLinear) -> None:
    for rows in (1, 4, 70, 300):
        x = torch.randn(rows, linear.in_features)
        expected = linear(x)
        launch.set_num_threads(2)
        try:
            assert torch.equal(linear(x), expected)
        finally:
            launch.set_num_threads(1)


def group_codes(
    bits: Literal[4, 8],
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    input_order: Tensor | None = None,
    is_float: bool = False,
    table: Tensor | None = None,
) -> GroupCodes:
    """Return grouped codes of tensors, which tests can generate and compare."""
    order = None if input_order is None else from_torch(input_order)
    held = None if offsets is None else from_torch(offsets)
    chosen = None if table is None else from_torch(table)
    return GroupCodes(bits, from_torch(codes), from_torch(scales), held, order, is_float, chosen)


def values_of(codes: GroupCodes) -> Tensor:
    return to_torch(codes.dequantize())
