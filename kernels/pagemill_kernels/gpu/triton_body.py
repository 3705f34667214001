"""Roundings that several kernels share: floats to the nearest code of 8 bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_to_int8(x):
    """To the nearest; x lies within -127 and 127."""
    return tl.floor(x + 0.5).to(tl.int8)


@triton.jit
def round_to_fp8(x):
    """To the nearest e4m3, ties to even; x is float32 and lies within -448 and 448.

    The grid is found by arithmetic, so the conversion behind it rounds nothing, whatever it would do: the interpreter's
    loses the carry into the exponent.
    """
    # The power of two below |x|, at least the smallest normal one; a step of the grid is an eighth of it.
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Added to x, this leaves no bits below a step.
    anchor = tl.maximum(power, 0.015625) * (0.125 * 12582912.0)
    return ((x + anchor) - anchor).to(tl.float8e4nv)


@triton.jit
def round_to_codes(x, IS_FP8: tl.constexpr):
    if IS_FP8:
        return round_to_fp8(x)
    else:
        return round_to_int8(x)
