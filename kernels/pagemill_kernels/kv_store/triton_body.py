"""Reads 8-bit cached values in pairs of 16 bits, because tensor cores take and load operands of 16 bits.

The first values of all pairs are one operand, the second values another.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter does not run inline assembly."""


def _int8_assembly(shift: int) -> str:
    """Return the assembly that converts int8 to float16 exactly.

    With its sign bit flipped, a value is the low byte of the float16 1024 + 128 + value, so one subtraction suffices.
    """
    return f"""{{
        .reg .b32 bytes, offset;
        shr.u32 bytes, $1, {shift};
        mov.b32 offset, 0x64806480;
        lop3.b32 bytes, bytes, 0x00ff00ff, offset, 0x6a;
        sub.f16x2 $0, bytes, offset;
    }}"""


def _fp8_assembly(bytes_of_pairs: str) -> str:
    return f"""{{
        .reg .b16 low, high;
        .reg .b32 bytes;
        prmt.b32 bytes, $1, $1, {bytes_of_pairs};
        mov.b32 {{low, high}}, bytes;
        cvt.rn.f16x2.e4m3x2 $0, low;
    }}"""


# Each converts one value of two pairs, which are in one register.
INT8_FIRST, INT8_SECOND = tl.constexpr(_int8_assembly(0)), tl.constexpr(_int8_assembly(8))
FP8_FIRST, FP8_SECOND = tl.constexpr(_fp8_assembly("0x0020")), tl.constexpr(_fp8_assembly("0x0031"))


@triton.jit
def convert(pairs, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def of_pairs(pairs, SECOND: tl.constexpr, IS_FP8: tl.constexpr):
    """Return the first or the second value of each int16 pair as float16, exactly."""
    if INTERPRETED:
        codes = (pairs >> (8 if SECOND else 0)).to(tl.int8)
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16) if IS_FP8 else codes.to(tl.float16)
    elif IS_FP8:
        return convert(pairs, FP8_SECOND if SECOND else FP8_FIRST)
    else:
        return convert(pairs, INT8_SECOND if SECOND else INT8_FIRST)
