"""Triton kernels that quantize rows of activations and multiply two 8-bit matrices."""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill_kernels.gpu.triton_body import round_to_codes


@triton.jit
def encode(x, scale, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, IS_FP8: tl.constexpr):
    codable = (scale >= SMALLEST) & (scale < float("inf"))
    inverse = tl.where(codable, 1.0 / tl.where(codable, scale, 1.0), 0.0)
    # Infinity times 0 is NaN, which this comparison turns into 0.
    scaled = tl.where(codable, x * inverse, 0.0)
    return round_to_codes(tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST), IS_FP8)


@triton.jit
def encode_rows(
    x_ptr,
    x_stride,
    codes_ptr,
    scales_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Quantize one row with a scale from its largest magnitude. A row that fits into BLOCK is read once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x_row = x_ptr + row * x_stride
    codes_row = codes_ptr + row * SIZE
    if SIZE <= BLOCK:
        x = tl.load(x_row + column, mask=column < SIZE, other=0.0).to(tl.float32)
        # A maximum may ignore NaN; a sum does not.
        scale = tl.max(tl.abs(x), 0) * (1.0 / LARGEST) + tl.sum(x * 0.0, 0)
        tl.store(codes_row + column, encode(x, scale, LARGEST, SMALLEST, IS_FP8), mask=column < SIZE)
    else:
        largest = tl.zeros([BLOCK], dtype=tl.float32)
        broken = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, SIZE, BLOCK):
            x = tl.load(x_row + start + column, mask=start + column < SIZE, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
            broken += x * 0.0
        scale = tl.max(largest, 0) * (1.0 / LARGEST) + tl.sum(broken, 0)
        for start in range(0, SIZE, BLOCK):
            mask = start + column < SIZE
            x = tl.load(x_row + start + column, mask=mask, other=0.0).to(tl.float32)
            tl.store(codes_row + start + column, encode(x, scale, LARGEST, SMALLEST, IS_FP8), mask=mask)
    tl.store(scales_ptr + row, scale)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_scaled(
    num_rows,
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATES: tl.constexpr,
):
    """Compute out (+)= (x W^T) * x_scales * scales + bias, where x and W have one 8-bit type."""
    # Programs that run together share BAND tiles of rows, so that they find a tile of the weight in the cache.
    COLUMN_TILES: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    band = program // (BAND * COLUMN_TILES)
    height = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - band * BAND, BAND)
    inside_band = program % (BAND * COLUMN_TILES)
    row = (band * BAND + inside_band % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = inside_band // height * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_rows, column < OUT

    # Rows and columns beyond the end compute the last one again: their loads need no mask.
    x_row = x_ptr + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * IN
    code_row = codes_ptr + tl.minimum(column, OUT - 1).to(tl.int64)[:, None] * IN
    k = tl.arange(0, BLOCK_K)
    # Hopper adds e4m3 products with fewer bits than float32 has; this limits that to one tile of inputs.
    IMPRECISE: tl.constexpr = BLOCK_K if IS_FP8 else 0
    SUM: tl.constexpr = tl.float32 if IS_FP8 else tl.int32
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=SUM)
    for start in range(0, IN, BLOCK_K):
        at = start + k[None, :]
        if IN % BLOCK_K == 0:
            x = tl.load(x_row + at)
            codes = tl.load(code_row + at)
        else:
            x = tl.load(x_row + at, mask=at < IN, other=0.0)
            codes = tl.load(code_row + at, mask=at < IN, other=0.0)
        sums = tl.dot(x, tl.trans(codes), acc=sums, max_num_imprecise_acc=IMPRECISE, out_dtype=SUM)

    x_scales = tl.load(x_scales_ptr + row, mask=is_row, other=0.0)
    scales = tl.load(scales_ptr + column, mask=is_column, other=0.0)
    result = sums.to(tl.float32) * x_scales[:, None] * scales[None, :]
    if HAS_BIAS:
        result += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    to = out_ptr + row.to(tl.int64)[:, None] * OUT + column[None, :]
    is_out = is_row[:, None] & is_column[None, :]
    if ACCUMULATES:
        result += tl.load(to, mask=is_out, other=0.0).to(tl.float32)
    tl.store(to, result.to(out_ptr.dtype.element_ty), mask=is_out)
