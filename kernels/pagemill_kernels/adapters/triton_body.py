"""Triton kernels of adapters: the sums of A for each row, then what B makes of them. Sums are float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shrink(
    x_ptr,
    x_stride,
    index_ptr,
    a_ptr,
    sums_ptr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute sums[row] = A x for one row; a row with the index -1 has no adapter."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + row)
    if index < 0:
        return
    rank = tl.arange(0, RANK)
    a_start = index * RANK * IN
    total = tl.zeros((RANK, BLOCK), dtype=tl.float32)
    for start in range(0, IN, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < IN
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + a_start + rank[:, None] * IN + column[None, :], mask=mask[None, :], other=0.0)
        total += a.to(tl.float32) * x[None, :]
    tl.store(sums_ptr + row * RANK + rank, tl.sum(total, 1))


@triton.jit
def expand(
    sums_ptr,
    index_ptr,
    b_ptr,
    out_ptr,
    out_stride,
    OUT: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add B sums to a block of one row's outputs."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + row)
    if index < 0:
        return
    rank = tl.arange(0, RANK)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = output < OUT
    sums = tl.load(sums_ptr + row * RANK + rank)
    b = tl.load(b_ptr + (index * OUT + output[:, None]) * RANK + rank[None, :], mask=mask[:, None], other=0.0)
    at = out_ptr + row * out_stride + output
    before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (before + tl.sum(b.to(tl.float32) * sums[None, :], 1)).to(out_ptr.dtype.element_ty), mask=mask)
