"""Weights in codes: 4 or 8 bits an input, a scale and perhaps an offset for each group of inputs.

GGUF's quantized types and packed checkpoints are this exactly (`engine.loading` translates), so nothing is requantized.
How floats become codes: `linear.quantize`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

GROUP_SIZE = 32
"""Inputs of the smallest group, except where 8-bit codes have groups of `SMALL_GROUP_SIZE`; others are multiples."""
SMALL_GROUP_SIZE = 16
FLOAT8 = torch.float8_e4m3fn


@dataclass(slots=True, frozen=True)
class GroupCodes:
    """Column i has the values codes[o, i] * scales[o, i // group_size] + offsets[o, i // group_size]; it is
    the weight of input `input_order[i]`."""

    bits: Literal[4, 8]
    codes: Tensor
    """uint8 [out, in], 0 to 15 (4 bits); int8 or `FLOAT8` [out, in] (8 bits)."""
    scales: Tensor
    """float32 [out, in / group_size]."""
    offsets: Tensor | None
    """float32 [out, in / group_size]; `None` means zero."""
    input_order: Tensor | None = None
    """int64 [in]; `None`: columns are in the order of the inputs."""

    @property
    def group_size(self) -> int:
        """Inputs that share a scale: a multiple of 32, or 16 for some 8-bit codes."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def is_float(self) -> bool:
        """Codes are floats of 8 bits, without offsets."""
        return self.codes.dtype == FLOAT8

    def reordered(self, order: Tensor) -> GroupCodes:
        """Row i of the result is row order[i]; int64 [out]."""
        offsets = None if self.offsets is None else self.offsets[order]
        codes = self.codes[order]  # INTERIM
        return replace(self, codes=codes, scales=self.scales[order], offsets=offsets)

    def dequantize(self) -> Tensor:
        """float32 [out, in], in the order of the inputs."""
        grouped = self.codes.to(torch.float32).view(*self.scales.shape, self.group_size) * self.scales[..., None]
        if self.offsets is not None:
            grouped += self.offsets[..., None]
        values = grouped.view(self.codes.shape)
        return values if self.input_order is None else torch.empty_like(values).index_copy_(1, self.input_order, values)


@dataclass(slots=True, frozen=True)
class CodeBlocks:
    """Codes as GGUF's simple types store them, not taken apart: blocks of 32 inputs, row by row.

    A block is a float16 scale, a float16 offset if `stored_offsets`, then the codes. 8 bits: signed bytes, no offset. 4
    bits: 16 bytes, whose low halves are the first 16 codes; without a stored offset it is -8 scales.
    """

    bits: Literal[4, 8]
    stored_offsets: bool
    data: Tensor
    """uint8 [out, in / 32, block bytes]."""

    def reordered(self, order: Tensor) -> CodeBlocks:
        """Row i of the result is row order[i]; int64 [out]."""
        return CodeBlocks(self.bits, self.stored_offsets, self.data[order])


def stack_blocks(parts: list[CodeBlocks]) -> CodeBlocks | None:
    """The parts one under another, of one width; `None` where they are of several kinds."""
    first = parts[0]
    if any((part.bits, part.stored_offsets) != (first.bits, first.stored_offsets) for part in parts):
        return None
    data = first.data if len(parts) == 1 else torch.cat([part.data for part in parts])
    return CodeBlocks(first.bits, first.stored_offsets, data)


def stack(parts: list[GroupCodes]) -> GroupCodes | None:
    """The parts one under another, of one width; those of another kind are widened, which changes no value.

    `None` where they have no kind in common: floats beside integers, or columns in several orders.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({part.is_float for part in parts}) > 1 or not all(_same_order(part, first) for part in parts):
        return None
    bits: Literal[4, 8] = 4 if all(part.bits == 4 for part in parts) else 8
    group_size = math.gcd(*(part.group_size for part in parts))
    with_offsets = any(part.offsets is not None for part in parts)
    parts = [_widened(part, bits, group_size, with_offsets) for part in parts]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(parts[0].codes.dtype)
    scales = torch.cat([part.scales for part in parts])
    return GroupCodes(bits, codes, scales, torch.cat(offsets) if offsets else None, first.input_order)


def _same_order(one: GroupCodes, other: GroupCodes) -> bool:
    if one.input_order is None or other.input_order is None:
        return one.input_order is other.input_order
    return torch.equal(one.input_order, other.input_order)


def _widened(part: GroupCodes, bits: Literal[4, 8], group_size: int, with_offsets: bool) -> GroupCodes:
    """The same values in wider codes, smaller groups, with offsets."""
    codes = part.codes if part.bits == bits else part.codes.view(torch.int8)
    offsets = part.offsets
    if offsets is None and with_offsets:
        offsets = torch.zeros_like(part.scales)
    repeats = part.group_size // group_size
    scales = _repeated(part.scales, repeats)
    return GroupCodes(bits, codes, scales, None if offsets is None else _repeated(offsets, repeats), part.input_order)


def _repeated(values: Tensor, times: int) -> Tensor:
    return values if times == 1 else values.repeat_interleave(times, 1)
