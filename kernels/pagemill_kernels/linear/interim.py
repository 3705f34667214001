"""Codes of tensors as codes of arrays, until `groups` holds arrays itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_kernels.torch_arrays import from_torch


@dataclass(slots=True, frozen=True)
class Codes(GroupCodes):
    floats: bool = False

    @property
    def is_float(self) -> bool:
        return self.floats


def as_arrays(weight: Any) -> Any:
    if isinstance(weight, CodeBlocks) and isinstance(weight.data, torch.Tensor):
        return CodeBlocks(weight.bits, weight.stored_offsets, from_torch(weight.data))
    if isinstance(weight, GroupCodes) and isinstance(weight.codes, torch.Tensor):
        codes = weight.codes.view(torch.uint8) if weight.is_float else weight.codes
        return Codes(
            bits=weight.bits,
            codes=from_torch(codes),
            scales=from_torch(weight.scales),
            offsets=None if weight.offsets is None else from_torch(weight.offsets),
            input_order=None if weight.input_order is None else from_torch(weight.input_order),
            floats=weight.is_float,
        )
    return weight
