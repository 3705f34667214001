"""Triton kernel that normalises rows, with or without a residual that is added first; float32 arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "eps"])
def normalize(
    num_rows,
    eps,
    x_ptr,
    x_outer_stride,
    x_inner_stride,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CENTERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Normalise some rows of [outer, INNER, SIZE].

    residual += x, then (x - mean) / sqrt(variance + eps) * weight + bias. Without CENTERS the mean counts as 0, which
    is the RMS norm.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED_SIZE)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    start = row // INNER * x_outer_stride + row % INNER * x_inner_stride
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=mask, other=0.0)
    flat = row[:, None] * SIZE + column[None, :]
    if HAS_RESIDUAL:
        x = (x.to(tl.float32) + tl.load(residual_ptr + flat, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + flat, x, mask=mask)
    wide = x.to(tl.float32)
    if CENTERS:
        mean = tl.sum(wide, 1) / SIZE
        wide = tl.where(mask, wide - mean[:, None], 0.0)
    variance = tl.sum(wide * wide, 1) / SIZE
    normed = wide * tl.rsqrt(variance + eps)[:, None]
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    result = normed * weight[None, :]
    if HAS_BIAS:
        result += tl.load(bias_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + flat, result.to(out_ptr.dtype.element_ty), mask=mask)
