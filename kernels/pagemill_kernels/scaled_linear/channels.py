"""8-bit weights with one scale per output, and the quantization of floats to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Magnitude of the largest value of each type."""
SMALLEST_SCALE = 1e-37
"""Rows with a smaller scale become zeros, because its inverse would overflow."""
MAX_INPUTS = (2**31 - 1) // 127**2
"""Number of int8 products whose sum always fits into int32."""
_PIECE_ELEMENTS = 1 << 24


@dataclass(slots=True, frozen=True)
class ChannelCodes:
    """A quantized weight: weight[o, i] = codes[o, i] * scales[o]."""

    codes: Tensor
    """int8 or float8_e4m3fn [out, in]."""
    scales: Tensor
    """float32 [out]."""

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        """Return the float values, float32 [out, in]."""
        return self.codes.float() * self.scales[:, None]


def quantize_channels(weight: Tensor, dtype: torch.dtype) -> ChannelCodes:
    """Quantize a weight, [out, in] of any float type, on any device.

    Raises ValueError for a width whose sums could overflow.
    """
    out_features, in_features = weight.shape
    if dtype == torch.int8 and in_features > MAX_INPUTS:
        raise ValueError(
            f"scaled linear: sums over {in_features} inputs can leave int32; int8 multiplies up to {MAX_INPUTS}, "
            "fp8 any number"
        )
    codes = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scales = torch.empty(out_features, device=weight.device)
    step = max(1, _PIECE_ELEMENTS // max(1, in_features))
    for start in range(0, out_features, step):
        rows = slice(start, min(start + step, out_features))
        codes[rows], scales[rows] = encode_rows(weight[rows], dtype)
    return ChannelCodes(codes, scales)


def encode_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return quantized rows like x and float32 scales [rows]. x: float [rows, size].

    A row that is not finite gets values of 0 and a scale that is not finite, so that all its sums are not finite
    either.
    """
    wide = x.float()
    # A maximum ignores NaN on some devices; a sum does not.
    scales = wide.abs().amax(-1) * (1 / LARGEST[dtype]) + (wide * 0).sum(-1)
    codable = (scales >= SMALLEST_SCALE) & scales.isfinite()
    inverse = torch.where(codable, 1 / scales, 0.0)
    scaled = (wide * inverse[:, None]).nan_to_num(0.0, 0.0, 0.0).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (scaled if dtype == torch.float8_e4m3fn else (scaled + 0.5).floor()).to(dtype), scales
