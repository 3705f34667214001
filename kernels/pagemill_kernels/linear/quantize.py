"""Floats to codes: every group by itself, to the nearest code.

8 bits: symmetric, the largest magnitude is 127. 4 bits: from the smallest to the largest value of the group, and of
several narrower ranges the one with the least squared error, since one outlier costs the other 31 their resolution;
then scale and offset are fitted to the codes by least squares.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pagemill_kernels.linear.groups import GROUP_SIZE, GroupCodes

RANGES = (0.9, 0.8)
"""Shares of a group's range that 4-bit codes may span; what lies outside takes the nearest end."""
REFINEMENTS = 3
"""Times that scale and offset are fitted to the codes, and the codes to these."""
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
    return (grouped / _positive(scales)[..., None]).round_().clamp_(-127, 127), scales


def _ranged4(grouped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and offsets with the least squared error of all that were tried."""
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    best = _Fit.of(grouped, half * (2 / 15), low)
    for share in RANGES:
        best = best.or_better(_Fit.of(grouped, half * (2 * share / 15), middle - half * share))
    for _ in range(REFINEMENTS):
        best = best.or_better(_Fit.of(grouped, *best.least_squares(grouped)))
    return best.codes, best.scales.squeeze(-1), best.offsets.squeeze(-1)


class _Fit(NamedTuple):
    """One way to round groups; scales, offsets and errors are [rows, groups, 1]."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor
    errors: Tensor

    @classmethod
    def of(cls, grouped: Tensor, scales: Tensor, offsets: Tensor) -> _Fit:
        """The nearest codes for these scales and offsets."""
        codes = ((grouped - offsets) / _positive(scales)).round_().clamp_(0, 15)
        errors = torch.addcmul(offsets, codes, scales).sub_(grouped).square_().sum(-1, keepdim=True)
        return cls(codes, scales, offsets, errors)

    def or_better(self, other: _Fit) -> _Fit:
        better = other.errors < self.errors
        return _Fit(*(torch.where(better, theirs, ours) for theirs, ours in zip(other, self, strict=True)))

    def least_squares(self, grouped: Tensor) -> tuple[Tensor, Tensor]:
        """The scales and offsets that fit these codes best."""
        code_mean, mean = self.codes.mean(-1, keepdim=True), grouped.mean(-1, keepdim=True)
        centred = self.codes - code_mean
        variance = centred.square().sum(-1, keepdim=True)
        scales = (centred * grouped).sum(-1, keepdim=True) / _positive(variance)
        return scales, mean - scales * code_mean


def _positive(divisor: Tensor) -> Tensor:
    """1 instead of what is not above 0: in a group of equal values scale, variance and what they divide are 0."""
    return torch.where(divisor > 0, divisor, 1.0)
