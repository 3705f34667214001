"""Weights in codes: 4 or 8 bits an input, a scale and perhaps an offset for every 32 or 16 inputs.

GGUF's quantized types are this exactly (`engine.loading` translates), so nothing is requantized. How floats become
codes: `linear.quantize`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GROUP_SIZE = 32
"""Inputs of a group, except where 8-bit codes have groups of `SMALL_GROUP_SIZE`."""
SMALL_GROUP_SIZE = 16


@dataclass(slots=True, frozen=True)
class GroupCodes:
    """weight[o, i] = codes[o, i] * scales[o, i // group_size] + offsets[o, i // group_size]."""

    bits: Literal[4, 8]
    codes: Tensor
    """uint8 [out, in], 0 to 15 (4 bits); int8 [out, in] (8 bits)."""
    scales: Tensor
    """float32 [out, in / group_size]."""
    offsets: Tensor | None
    """float32 [out, in / group_size]; `None` means zero."""

    @property
    def group_size(self) -> int:
        """Inputs that share a scale: 32, or 16 for some 8-bit codes."""
        return self.codes.shape[1] // self.scales.shape[1]

    def reordered(self, order: Tensor) -> GroupCodes:
        """Row i of the result is row order[i]; int64 [out]."""
        offsets = None if self.offsets is None else self.offsets[order]
        return GroupCodes(self.bits, self.codes[order], self.scales[order], offsets)

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        grouped = self.codes.to(torch.float32).view(*self.scales.shape, self.group_size) * self.scales[..., None]
        if self.offsets is not None:
            grouped += self.offsets[..., None]
        return grouped.view(self.codes.shape)


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


def stack(parts: list[GroupCodes]) -> GroupCodes:
    """The parts one under another, of one width; those of another kind are widened, which changes no value."""
    bits: Literal[4, 8] = 4 if all(part.bits == 4 for part in parts) else 8
    group_size = min(part.group_size for part in parts)
    with_offsets = any(part.offsets is not None for part in parts)
    parts = [_widened(part, bits, group_size, with_offsets) for part in parts]
    if len(parts) == 1:
        return parts[0]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return GroupCodes(
        bits,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(offsets) if offsets else None,
    )


def _widened(part: GroupCodes, bits: Literal[4, 8], group_size: int, with_offsets: bool) -> GroupCodes:
    """The same values in wider codes, smaller groups, with offsets."""
    repeats = part.group_size // group_size
    codes = part.codes if part.bits == bits else part.codes.view(torch.int8)
    offsets = part.offsets
    if offsets is None and with_offsets:
        offsets = torch.zeros_like(part.scales)
    if repeats == 1:
        return GroupCodes(bits, codes, part.scales, offsets)
    scales = part.scales.repeat_interleave(repeats, 1)
    return GroupCodes(bits, codes, scales, None if offsets is None else offsets.repeat_interleave(repeats, 1))
