"""Triton kernels of quantized weights: matmuls that dequantize tiles, and dequantization for matmuls of many rows.

8-bit values are stored as [out, in] bytes. 4-bit values are stored as [out, in / 2] bytes: the 16 bytes of a run of 32
inputs contain its first 16 values in their low halves and its last 16 in their high halves. A group, whose inputs share
a scale, is one run or several.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spread(values, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Repeat each value for all inputs of its run: [ROWS, GROUPS] -> [ROWS, GROUPS * SIZE]."""
    wide = tl.broadcast_to(tl.expand_dims(values, 2), (ROWS, GROUPS, SIZE))
    return tl.reshape(wide, (ROWS, GROUPS * SIZE))


@triton.jit
def to_floats(codes, scales, offsets, HAS_OFFSETS: tl.constexpr):
    """Return codes * scales + offsets."""
    values = codes.to(tl.float32) * scales
    if HAS_OFFSETS:
        values += offsets
    return values


@triton.jit
def add_codes_product(
    result,
    x_row,
    is_row,
    weight_row,
    is_column,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    order_ptr,
    IN: tl.constexpr,
    RUN: tl.constexpr,
    RUNS_IN_GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return result + x W^T for the rows of x that `x_row` points to and the rows `weight_row` (int64) of W."""
    NUM_RUNS: tl.constexpr = IN // RUN
    NUM_GROUPS: tl.constexpr = NUM_RUNS // RUNS_IN_GROUP
    # Inputs of a run that one tl.dot takes: with 4 bits, the low halves and the high halves separately.
    SIZE: tl.constexpr = RUN // 2 if BITS == 4 else RUN
    ROW_BYTES: tl.constexpr = NUM_RUNS * SIZE
    code_row = codes_ptr + weight_row[:, None] * ROW_BYTES
    byte = tl.arange(0, RUNS * SIZE)
    element = x_row.dtype.element_ty
    for first in range(0, NUM_RUNS, RUNS):
        run = first + tl.arange(0, RUNS)
        is_run = is_column[:, None] & (run < NUM_RUNS)[None, :]
        group_at = weight_row[:, None] * NUM_GROUPS + (run // RUNS_IN_GROUP)[None, :]
        scales = spread(tl.load(scales_ptr + group_at, mask=is_run, other=0.0), BLOCK_N, RUNS, SIZE)
        at = first * SIZE + byte
        inside = at < ROW_BYTES
        codes = tl.load(code_row + at[None, :], mask=is_column[:, None] & inside[None, :], other=0)
        low = (codes & 15) if BITS == 4 else codes
        offsets = scales
        if HAS_OFFSETS:
            offsets = spread(tl.load(offsets_ptr + group_at, mask=is_run, other=0.0), BLOCK_N, RUNS, SIZE)
        weights = to_floats(low, scales, offsets, HAS_OFFSETS)
        columns = at // SIZE * RUN + at % SIZE
        mask = is_row[:, None] & inside[None, :]
        inputs = tl.load(order_ptr + columns, mask=inside, other=0) if HAS_ORDER else columns
        x = tl.load(x_row + inputs[None, :], mask=mask, other=0.0)
        result = tl.dot(x, tl.trans(weights.to(element)), acc=result, input_precision=PRECISION)
        if BITS == 4:
            weights = to_floats(codes >> 4, scales, offsets, HAS_OFFSETS)
            columns += SIZE
            inputs = tl.load(order_ptr + columns, mask=inside, other=0) if HAS_ORDER else columns
            x = tl.load(x_row + inputs[None, :], mask=mask, other=0.0)
            result = tl.dot(x, tl.trans(weights.to(element)), acc=result, input_precision=PRECISION)
    return result


@triton.jit(do_not_specialize=["num_rows"])
def multiply_codes(
    num_rows,
    x_ptr,
    x_stride,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    order_ptr,
    bias_ptr,
    out_ptr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RUN: tl.constexpr,
    RUNS_IN_GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute out (+)= x W^T + bias, where W[o, order[i]] = codes[o, i] * scales[o, g] + offsets[o, g] with i's
    group g."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_rows, column < OUT
    result = add_codes_product(
        tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32),
        x_ptr + row.to(tl.int64)[:, None] * x_stride,
        is_row,
        column.to(tl.int64),
        is_column,
        codes_ptr,
        scales_ptr,
        offsets_ptr,
        order_ptr,
        IN,
        RUN,
        RUNS_IN_GROUP,
        BITS,
        BLOCK_N,
        RUNS,
        HAS_OFFSETS,
        HAS_ORDER,
        PRECISION,
    )
    if HAS_BIAS:
        result += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    to = out_ptr + row.to(tl.int64)[:, None] * OUT + column[None, :]
    is_out = is_row[:, None] & is_column[None, :]
    if ACCUMULATES:
        result += tl.load(to, mask=is_out, other=0.0).to(tl.float32)
    tl.store(to, result.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["first"])
def dequantize(
    first,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    out_ptr,
    IN: tl.constexpr,
    RUN: tl.constexpr,
    RUNS_IN_GROUP: tl.constexpr,
    BITS: tl.constexpr,
    RUNS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """Compute out[i] = W[first + i] in floats, RUNS runs of a row in each program, in the order of the columns."""
    NUM_RUNS: tl.constexpr = IN // RUN
    SIZE: tl.constexpr = RUN // 2 if BITS == 4 else RUN
    i = tl.program_id(0).to(tl.int64)
    row = first + i
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    inside = run < NUM_RUNS
    group_at = row * (NUM_RUNS // RUNS_IN_GROUP) + run // RUNS_IN_GROUP
    scales = tl.load(scales_ptr + group_at, mask=inside, other=0.0)[:, None]
    offsets = scales
    if HAS_OFFSETS:
        offsets = tl.load(offsets_ptr + group_at, mask=inside, other=0.0)[:, None]
    byte = run[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    codes = tl.load(codes_ptr + row * (NUM_RUNS * SIZE) + byte, mask=inside[:, None], other=0)
    to = out_ptr + i * IN + run[:, None] * RUN + tl.arange(0, SIZE)[None, :]
    low = (codes & 15) if BITS == 4 else codes
    values = to_floats(low, scales, offsets, HAS_OFFSETS)
    tl.store(to, values.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    if BITS == 4:
        values = to_floats(codes >> 4, scales, offsets, HAS_OFFSETS)
        tl.store(to + SIZE, values.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def gather_codes(
    ids_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    out_ptr,
    IN: tl.constexpr,
    RUN: tl.constexpr,
    RUNS_IN_GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """Compute out[i] = W[ids[i]] in floats, a piece at a time, in the order of the columns."""
    i = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < IN
    row = tl.load(ids_ptr + i)
    if BITS == 4:
        HALF: tl.constexpr = RUN // 2
        byte = column // RUN * HALF + column % HALF
        both = tl.load(codes_ptr + row * (IN // 2) + byte, mask=mask, other=0)
        codes = tl.where(column % RUN < HALF, both & 15, both >> 4)
    else:
        codes = tl.load(codes_ptr + row * IN + column, mask=mask, other=0.0)
    GROUP: tl.constexpr = RUN * RUNS_IN_GROUP
    group_at = row * (IN // GROUP) + column // GROUP
    values = codes.to(tl.float32) * tl.load(scales_ptr + group_at, mask=mask, other=0.0)
    if HAS_OFFSETS:
        values += tl.load(offsets_ptr + group_at, mask=mask, other=0.0)
    tl.store(out_ptr + i * IN + column, values, mask=mask)
