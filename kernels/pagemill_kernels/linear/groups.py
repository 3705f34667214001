"""Weights in codes: 4 or 8 bits an input, a scale and an offset for every 32 inputs.

GGUF's Q4_0, Q4_1, Q4_K, Q5_0 and Q8_0 are this exactly (`engine.loading` translates), so nothing is requantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GROUP_SIZE = 32


@dataclass(slots=True, frozen=True)
class GroupCodes:
    """weight[o, i] = codes[o, i] * scales[o, i // 32] + offsets[o, i // 32]."""

    bits: Literal[4, 8]
    codes: Tensor
    """uint8 [out, in], 0 to 15 (4 bits); int8 [out, in] (8 bits)."""
    scales: Tensor
    """float32 [out, in / 32]."""
    offsets: Tensor | None
    """float32 [out, in / 32]; `None` means zero. 8-bit codes have none."""

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        grouped = self.codes.to(torch.float32).view(*self.scales.shape, GROUP_SIZE) * self.scales[..., None]
        if self.offsets is not None:
            grouped += self.offsets[..., None]
        return grouped.view(self.codes.shape)


def stack(parts: list[GroupCodes]) -> GroupCodes | None:
    """The parts one under another; `None` when they are not of one kind."""
    first = parts[0]
    if any(part.bits != first.bits or (part.offsets is None) != (first.offsets is None) for part in parts):
        return None
    if len(parts) == 1:
        return first
    offsets = None if first.offsets is None else torch.cat([p.offsets for p in parts if p.offsets is not None])
    return GroupCodes(first.bits, torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]), offsets)
