"""Rounding functions that several kernels share: floats to the nearest 8-bit value."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_to_int8(x):
    """Round to the nearest integer; x is between -127 and 127."""
    return tl.floor(x + 0.5).to(tl.int8)


@triton.jit
def round_to_fp8(x):
    """Round to the nearest e4m3, ties to even; x is float32 between -448 and 448.

    The grid is found by arithmetic, so the final conversion is exact: the interpreter's conversion would lose the carry
    into the exponent.
    """
    # The power of two below |x|, at least the smallest normal one; a step of the grid is an eighth of it.
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Adding this to x removes all bits below a step.
    anchor = tl.maximum(power, 0.015625) * (0.125 * 12582912.0)
    return ((x + anchor) - anchor).to(tl.float8e4nv)


@triton.jit
def round_to_codes(x, IS_FP8: tl.constexpr):
    if IS_FP8:
        return round_to_fp8(x)
    else:
        return round_to_int8(x)
