"""Triton kernels of experts: matmuls of rows with their experts' weights, and the weighted sum of a token's results.

Rows are numbered by slots, token * TOP_K + j, and sorted by expert; a block of rows belongs to one expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill_kernels.linear.triton_body import add_codes_product


@triton.jit
def multiply_experts(
    x_ptr,
    slots_ptr,
    starts_ptr,
    blocks_ptr,
    weight_ptr,
    scales_ptr,
    offsets_ptr,
    order_ptr,
    bias_ptr,
    out_ptr,
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    DIVISOR: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RUN: tl.constexpr,
    RUNS_IN_GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute out[slot] = x[slot

    DIVISOR] W^T + bias with the slot's expert.

    starts, blocks: index of the first sorted slot and of the first block of each expert, [NUM_EXPERTS + 1].
    """
    block = tl.program_id(0)
    experts = tl.arange(0, PADDED_EXPERTS)
    ends = tl.load(blocks_ptr + 1 + experts, mask=experts < NUM_EXPERTS, other=2147483647)
    expert = tl.sum((ends <= block).to(tl.int32), 0)
    if expert >= NUM_EXPERTS:
        return
    first = (block - tl.load(blocks_ptr + expert)) * BLOCK_M
    at = tl.load(starts_ptr + expert) + first + tl.arange(0, BLOCK_M)
    is_row = at < tl.load(starts_ptr + expert + 1)
    slot = tl.load(slots_ptr + at, mask=is_row, other=0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < OUT
    weight_row = expert.to(tl.int64) * OUT + column
    x_row = x_ptr + (slot // DIVISOR)[:, None] * IN
    result = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if BITS == 0:
        for start in range(0, IN, BLOCK_K):
            inputs = start + tl.arange(0, BLOCK_K)
            inside = (inputs < IN)[None, :]
            x = tl.load(x_row + inputs[None, :], mask=is_row[:, None] & inside, other=0.0)
            weights = tl.load(
                weight_ptr + weight_row[:, None] * IN + inputs[None, :], mask=is_column[:, None] & inside, other=0.0
            )
            result = tl.dot(x, tl.trans(weights), acc=result, input_precision=PRECISION)
    else:
        result = add_codes_product(
            result,
            x_row,
            is_row,
            weight_row,
            is_column,
            weight_ptr,
            scales_ptr,
            offsets_ptr,
            order_ptr + expert.to(tl.int64) * IN,
            IN,
            RUN,
            RUNS_IN_GROUP,
            BITS,
            BLOCK_N,
            BLOCK_K // RUN,
            HAS_OFFSETS,
            HAS_ORDER,
            PRECISION,
        )
    if HAS_BIAS:
        result += tl.load(bias_ptr + weight_row, mask=is_column, other=0.0).to(tl.float32)[None, :]
    to = out_ptr + slot[:, None] * OUT + column[None, :]
    tl.store(to, result.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def add_weighted(results_ptr, weights_ptr, out_ptr, SIZE: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a piece of out[token] += sum over j of weights[token, j] * results[token, j]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    total = tl.load(out_ptr + token * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    for j in range(TOP_K):
        slot = token * TOP_K + j
        values = tl.load(results_ptr + slot * SIZE + column, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + slot) * values
    tl.store(out_ptr + token * SIZE + column, total.to(out_ptr.dtype.element_ty), mask=mask)
