"""Floats to codes: every group by itself, to the nearest code.

8 bits: symmetric, the largest magnitude is 127. 4 bits: from the smallest to the largest value of the group, and of
several narrower ranges the one with the least squared error, since one outlier costs the other 31 their resolution.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pagemill_kernels.linear.groups import GROUP_SIZE, GroupCodes

RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Shares of a group's range that 4-bit codes may span; what lies outside takes the nearest end."""
_PIECE_ELEMENTS = 1 << 20


def quantize(weight: Tensor, bits: Literal[4, 8]) -> GroupCodes:
    """weight: [out, in] of any float type, `in` a multiple of 32. Temporaries stay small beside the codes."""
    out_features, in_features = weight.shape
    groups = (out_features, in_features // GROUP_SIZE)
    codes = torch.empty(weight.shape, dtype=torch.uint8 if bits == 4 else torch.int8)
    scales = torch.empty(groups)
    offsets = torch.empty(groups) if bits == 4 else None
    step = max(1, _PIECE_ELEMENTS // in_features)
    for start in range(0, out_features, step):
        rows = slice(start, min(start + step, out_features))
        grouped = weight[rows].float().view(-1, groups[1], GROUP_SIZE)
        if offsets is None:
            piece, scales[rows] = _symmetric8(grouped)
        else:
            piece, scales[rows], offsets[rows] = _ranged4(grouped)
        codes[rows] = piece.view(-1, in_features).to(codes.dtype)
    return GroupCodes(bits, codes, scales, offsets)


def _symmetric8(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """grouped: float32 [rows, groups, 32]. Returns codes (floats, like it) and scales [rows, groups]."""
    scales = grouped.abs().amax(-1) / 127
    return (grouped / _divisor(scales)).round_().clamp_(-127, 127), scales


def _ranged4(grouped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and offsets of the range with the least squared error."""
    low, high = grouped.amin(-1), grouped.amax(-1)
    middle, half = (low + high) / 2, (high - low) / 2
    best_error = torch.full_like(low, float("inf"))
    codes, scales, offsets = torch.empty_like(grouped), torch.empty_like(low), torch.empty_like(low)
    for share in RANGES:
        scale, offset = half * (2 * share / 15), middle - half * share
        tried = ((grouped - offset[..., None]) / _divisor(scale)).round_().clamp_(0, 15)
        error = torch.addcmul(offset[..., None], tried, scale[..., None]).sub_(grouped).square_().sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        codes = torch.where(better[..., None], tried, codes)
        scales, offsets = torch.where(better, scale, scales), torch.where(better, offset, offsets)
    return codes, scales, offsets


def _divisor(scales: Tensor) -> Tensor:
    """Scales to divide by, [..., 1]: a group of equal values has the scale 0 and the codes 0."""
    return torch.where(scales > 0, scales, 1.0)[..., None]
