"""Triton kernel that copies rows of a matrix, a piece at a time."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_rows(table_ptr, table_stride, ids_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a piece of out[i] = table[ids[i]]."""
    i = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + i)
    values = tl.load(table_ptr + row * table_stride + column, mask=column < SIZE)
    tl.store(out_ptr + i * SIZE + column, values, mask=column < SIZE)
