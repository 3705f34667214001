"""Quantizes floats, every group by itself, to the nearest value.

8 bits: symmetric, the largest magnitude becomes 127. 4 bits: the range from the smallest to the largest value of the
group, or the one of several narrower ranges with the least squared error, since one outlier costs the other 31 values
their resolution; then scale and offset are fitted to the quantized values by least squares.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill_kernels.arrays import Array, widened
from pagemill_kernels.linear.groups import GROUP_SIZE, GroupCodes
from pagemill_kernels.pieces import each_piece

RANGES = (0.9, 0.8)
"""Shares of a group's range that 4-bit values may span; values outside take the nearest end."""
REFINEMENTS = 3
"""Number of times that scale and offset are fitted to the quantized values, and these to scale and offset."""

Floats = NDArray[np.float32]


def quantize(weight: Array, bits: Literal[4, 8]) -> GroupCodes:
    """Quantize a weight. Temporaries stay small compared with the result.

    weight: [out, in] of any float type, `in` a multiple of 32.
    """
    out_features, in_features = weight.shape
    groups = (out_features, in_features // GROUP_SIZE)
    codes = np.empty(weight.shape, dtype=np.uint8 if bits == 4 else np.int8)
    scales = np.empty(groups, dtype=np.float32)
    offsets = np.empty(groups, dtype=np.float32) if bits == 4 else None

    def encode(rows: slice) -> None:
        grouped = widened(weight[rows]).reshape(-1, groups[1], GROUP_SIZE)
        if offsets is None:
            piece, scales[rows] = _symmetric8(grouped)
        else:
            piece, scales[rows], offsets[rows] = _ranged4(grouped)
        codes[rows] = piece.reshape(-1, in_features)

    each_piece(out_features, in_features, encode)
    return GroupCodes(bits, codes, scales, offsets)


def _symmetric8(grouped: Floats) -> tuple[Floats, Floats]:
    """Return quantized values (floats, like `grouped`) and scales [rows, groups]. grouped: [rows, groups, 32]."""
    scales = np.abs(grouped).max(-1) / 127
    codes = grouped / _positive(scales)[..., None]
    return np.rint(codes, out=codes).clip(-127, 127, out=codes), scales


def _ranged4(grouped: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the values, scales and offsets with the least squared error of all tried ones."""
    low, high = grouped.min(-1, keepdims=True), grouped.max(-1, keepdims=True)
    middle, half = (low + high) / 2, (high - low) / 2
    best = _Fit.of(grouped, half * (2 / 15), low)
    for share in RANGES:
        best = best.or_better(_Fit.of(grouped, half * (2 * share / 15), middle - half * share))
    for _ in range(REFINEMENTS):
        best = best.or_better(_Fit.of(grouped, *best.least_squares(grouped)))
    return best.codes, best.scales.squeeze(-1), best.offsets.squeeze(-1)


class _Fit(NamedTuple):
    """One quantization of groups; scales, offsets and errors are [rows, groups, 1]."""

    codes: Floats
    scales: Floats
    offsets: Floats
    errors: Floats

    @classmethod
    def of(cls, grouped: Floats, scales: Floats, offsets: Floats) -> _Fit:
        """Return the nearest values for these scales and offsets."""
        codes = grouped - offsets
        codes /= _positive(scales)
        np.rint(codes, out=codes).clip(0, 15, out=codes)
        wrong = codes * scales
        wrong += offsets
        wrong -= grouped
        wrong *= wrong
        return cls(codes, scales, offsets, wrong.sum(-1, keepdims=True))

    def or_better(self, other: _Fit) -> _Fit:
        better = other.errors < self.errors
        return _Fit(*(np.where(better, theirs, ours) for theirs, ours in zip(other, self, strict=True)))

    def least_squares(self, grouped: Floats) -> tuple[Floats, Floats]:
        """Return the scales and offsets that fit these values best."""
        code_mean, mean = self.codes.mean(-1, keepdims=True), grouped.mean(-1, keepdims=True)
        centred = self.codes - code_mean
        variance = np.square(centred).sum(-1, keepdims=True)
        centred *= grouped
        scales = centred.sum(-1, keepdims=True) / _positive(variance)
        return scales, mean - scales * code_mean


def _positive(divisor: Floats) -> Floats:
    """Replace non-positive divisors by 1: in a group of equal values scale, variance and their dividends are 0."""
    return np.where(divisor > 0, divisor, np.float32(1))
