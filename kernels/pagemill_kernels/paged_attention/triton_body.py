"""Triton kernels of attention over block tables: one for prefills and decodes, and one that joins split contexts.

A program takes a Q block: some tokens of one request times all query heads of one key/value head, so that a tile of
keys is read once for the whole group. Prefills: Q blocks are numbered over the batch, with one partial block allowed
per request, and a program finds its request by a binary search. Decodes: every request has the same number of Q blocks.
So grids follow from shapes alone. A batch of both kinds is two launches over all requests, each of which skips the
other's requests.

An 8-bit cache is read in pairs (`kv_store.triton_body`), so there are two tl.dot operations instead of one. A token's
scales are multiplied into its scores and into its weights; a power of two of the latter is applied before the softmax's
maximum is taken, so that the result fits into float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill_kernels.kv_store.triton_body import of_pairs

LOG2E = tl.constexpr(1.4426950408889634)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
SMALLEST_SCALE = tl.constexpr(2.0**-60)
"""Replaces a value scale of 0, whose values are all 0, because no power of two is below 0."""


@triton.jit
def first_q_block(query_start_ptr, request, BLOCK_Q: tl.constexpr):
    """Return the number of Q blocks before the request's own; each request may leave one block partly empty."""
    return tl.load(query_start_ptr + request) // BLOCK_Q + request


@triton.jit
def find_request(query_start_ptr, block, num_requests, BLOCK_Q: tl.constexpr):
    """Return the last request whose first Q block is not behind `block`."""
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        if first_q_block(query_start_ptr, middle, BLOCK_Q) <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def split_range(lower, upper, split, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLIT_TOKENS: tl.constexpr):
    """Return the range of a context that one split reads, in whole tiles; empty if the context is too short to be
    split."""
    used = tl.minimum(tl.maximum(tl.cdiv(upper - lower, SPLIT_TOKENS), 1), NUM_SPLITS)
    tokens = tl.cdiv(tl.cdiv(upper - lower, TILE), used) * TILE
    return lower + split * tokens, tl.minimum(lower + (split + 1) * tokens, upper)


@triton.jit
def load_vectors(pointers, columns, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load the vector at each pointer, padded with zeros."""
    if SIZE == PADDED:
        return tl.load(pointers[:, None] + columns[None, :])
    else:
        return tl.load(pointers[:, None] + columns[None, :], mask=(columns < SIZE)[None, :], other=0)


@triton.jit
def load_query(pointers, is_row, columns, SIZE: tl.constexpr, STEP: tl.constexpr):
    """Load every STEP-th dimension of the rows' queries."""
    mask = is_row[:, None] & (columns < SIZE)[None, :]
    return tl.load(pointers[:, None] + STEP * columns[None, :], mask=mask, other=0.0)


@triton.jit
def power_below(x):
    """Return the power of two below each x >= 0."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.maximum(power, SMALLEST_NORMAL)


@triton.jit
def exponents_of(x):
    """Return the exponent of the power of two below each x > 0, and the reciprocal of that power."""
    power = x.to(tl.int32, bitcast=True) & 0x7F800000
    return ((power >> 23) - 127).to(tl.float32), (0x7F000000 - power).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_requests", "few_tokens", "window", "scale", "soft_cap", "table_stride"])
def attend(
    num_requests,
    few_tokens,
    window,
    scale,
    soft_cap,
    query_ptr,
    query_stride,
    cache_ptr,
    cache_scales_ptr,
    table_ptr,
    table_stride,
    query_start_ptr,
    seq_lens_ptr,
    slopes_ptr,
    sinks_ptr,
    out_ptr,
    maxima_ptr,
    sums_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CODES: tl.constexpr,
    IS_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    FIRST_KEY: tl.constexpr = 0,
):
    """Compute out = softmax(q k^T * scale + mask) v, or with splits the partial results for `join_splits`.

    few_tokens: requests with at most this many tokens are decodes, and only the launch for decodes computes them.
    FIRST_KEY: tokens of a context before this one are seen by themselves alone.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if IS_DECODE:
        q_blocks = tl.cdiv(few_tokens, BLOCK_Q)
        request = block // q_blocks
        first = block % q_blocks * BLOCK_Q
    else:
        # A request's last tokens see the most keys: the longest programs start first.
        block = tl.num_programs(0) - 1 - block
        request = find_request(query_start_ptr, block, num_requests, BLOCK_Q)
        first = (block - first_q_block(query_start_ptr, request, BLOCK_Q)) * BLOCK_Q
    start = tl.load(query_start_ptr + request)
    num_tokens = tl.load(query_start_ptr + request + 1) - start
    if first >= num_tokens:
        return
    if (num_tokens <= few_tokens) != IS_DECODE:
        return

    # Rows of the tile: the group's heads of the first token, then of the second, and so on.
    rows = tl.arange(0, BLOCK_M)
    token = first + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (token < num_tokens)
    context = tl.load(seq_lens_ptr + request) - num_tokens
    # Rows beyond the request compute the last token's mask, so that nothing in them can become NaN.
    position = context + tl.minimum(token, num_tokens - 1)
    row_token = (start + token).to(tl.int64)
    query_rows = query_ptr + row_token * query_stride + head * HEAD_DIM
    CODES: tl.constexpr = 2 if HAS_CODES else 1
    SIZE: tl.constexpr = HEAD_DIM // CODES
    # tl.dot needs at least 16 in every dimension.
    PADDED: tl.constexpr = max(PADDED_DIM // CODES, 16)
    columns = tl.arange(0, PADDED)
    query = load_query(query_rows, is_row, columns, SIZE, CODES)
    second_query = query
    row_scale = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    if HAS_CODES:
        # Scaled to values that fit into float16.
        OPERAND: tl.constexpr = tl.float32 if query.dtype == tl.float32 else tl.float16
        query = query.to(tl.float32)
        second_query = load_query(query_rows + 1, is_row, columns, SIZE, CODES).to(tl.float32)
        row_scale = power_below(tl.maximum(tl.max(tl.abs(query), 1), tl.max(tl.abs(second_query), 1)))
        query = (query / row_scale[:, None]).to(OPERAND)
        second_query = (second_query / row_scale[:, None]).to(OPERAND)

    # Causal and window skipping: tiles that none of the block's tokens sees are not visited.
    upper = context + tl.minimum(first + BLOCK_Q, num_tokens)
    first_visible = 0
    if HAS_WINDOW:
        first_visible = tl.maximum(context + first - window + 1, 0)
    lower = first_visible // TILE * TILE
    begin, end = lower, upper
    if NUM_SPLITS > 1:
        begin, end = split_range(lower, upper, split, TILE, NUM_SPLITS, SPLIT_TOKENS)

    slopes = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SLOPES:
        slopes = tl.load(slopes_ptr + head, mask=is_row, other=0.0).to(tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SINKS:
        # A sink is a score without a value; of several splits only the first one, which always has keys, counts it.
        sinks = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        maximum = tl.where(split == 0, sinks, maximum)
        total = tl.where(split == 0, 1.0, total)
    result = tl.zeros([BLOCK_M, PADDED], dtype=tl.float32)
    second_result = tl.zeros([BLOCK_M, PADDED], dtype=tl.float32)
    # Sizes of a head's part of a block and of a token in it; the float32 scales of 8-bit values follow the values.
    PART: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4) // 2 if HAS_CODES else BLOCK_SIZE * HEAD_DIM
    SCALE: tl.constexpr = 2
    table_row = table_ptr + request.to(tl.int64) * table_stride
    factor = LOG2E if HAS_SOFT_CAP or HAS_SLOPES else scale * LOG2E
    keys_of_tile = tl.arange(0, TILE)
    # Keys that no row sees are replaced by one that some row sees, and masked below.
    slot = tl.maximum(tl.minimum(begin + keys_of_tile, upper - 1), first_visible)
    block_id = tl.load(table_row + slot // BLOCK_SIZE)
    for tile in tl.range(begin, end, TILE):
        key_position = tile + keys_of_tile
        part = block_id.to(tl.int64) * BLOCK_STRIDE + kv_head * PART
        vectors = cache_ptr + part + slot % BLOCK_SIZE * SIZE
        keys = tl.trans(load_vectors(vectors, columns, SIZE, PADDED))
        values = load_vectors(vectors + NUM_KV_HEADS * PART, columns, SIZE, PADDED)
        # Block ids of the next tile are loaded now, so that its addresses are known in the next iteration.
        next_slot = tl.maximum(tl.minimum(key_position + TILE, upper - 1), first_visible)
        block_id = tl.load(table_row + next_slot // BLOCK_SIZE)
        if HAS_CODES:
            first_codes = of_pairs(keys, False, IS_FP8).to(OPERAND)
            second_codes = of_pairs(keys, True, IS_FP8).to(OPERAND)
            scores = tl.dot(query, first_codes, input_precision=PRECISION)
            scores = tl.dot(second_query, second_codes, acc=scores, input_precision=PRECISION)
            scales = cache_scales_ptr + (part // SCALE + slot % BLOCK_SIZE) + BLOCK_SIZE * HEAD_DIM // 4
            value_scales = tl.load(scales + NUM_KV_HEADS * PART // SCALE)
            scores *= tl.load(scales)[None, :] * row_scale[:, None]
        else:
            scores = tl.dot(query, keys.to(query.dtype), input_precision=PRECISION)
        if HAS_SOFT_CAP:
            # cap * tanh(s / cap), with tanh(x) = 2 sigmoid(2x) - 1.
            scores = soft_cap * (2.0 * tl.sigmoid(scores * (2.0 * scale / soft_cap)) - 1.0)
        elif HAS_SLOPES:
            scores *= scale
        if HAS_SLOPES:
            scores += slopes[:, None] * (key_position[None, :] - position[:, None])
        # Most tiles are before all of the block's tokens, and in the windows of all.
        is_masked = tile + TILE > context + first + 1
        if HAS_WINDOW:
            is_masked |= tile < upper - window
        if FIRST_KEY > 0:
            is_masked |= tile < FIRST_KEY
        if is_masked:
            visible = key_position[None, :] <= position[:, None]
            if HAS_WINDOW:
                visible &= key_position[None, :] > position[:, None] - window
            if FIRST_KEY > 0:
                visible &= (key_position[None, :] >= FIRST_KEY) | (position[:, None] < FIRST_KEY)
            scores = tl.where(visible, scores, float("-inf"))

        # Softmax over what was seen so far: rescale the old sum and result to the new maximum.
        if HAS_CODES:
            value_scales = tl.maximum(value_scales, SMALLEST_SCALE)
            value_exponents, one_by_powers = exponents_of(value_scales)
            exponents = scores * factor + value_exponents[None, :]
            highest = tl.maximum(maximum, tl.max(exponents, 1))
        else:
            exponents = scores * factor
            highest = tl.maximum(maximum, tl.max(scores, 1) * factor)
        pivot = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(exponents - pivot[:, None])
        shrink = tl.exp2(maximum - pivot)
        maximum = highest
        result = result * shrink[:, None]
        if HAS_CODES:
            total = total * shrink + tl.sum(weights * one_by_powers[None, :], 1)
            weights = (weights * (value_scales * one_by_powers)[None, :]).to(OPERAND)
            first_codes = of_pairs(values, False, IS_FP8).to(OPERAND)
            second_codes = of_pairs(values, True, IS_FP8).to(OPERAND)
            result = tl.dot(weights, first_codes, acc=result, input_precision=PRECISION)
            second_result = second_result * shrink[:, None]
            second_result = tl.dot(weights, second_codes, acc=second_result, input_precision=PRECISION)
        else:
            total = total * shrink + tl.sum(weights, 1)
            result = tl.dot(weights.to(query.dtype), values.to(query.dtype), acc=result, input_precision=PRECISION)
        slot = next_slot

    if HAS_CODES:
        result = tl.interleave(result, second_result)
    if NUM_SPLITS == 1:
        result = result / tl.where(total > 0.0, total, 1.0)[:, None]
        out_row = row_token * NUM_HEADS + head
    else:
        out_row = ((request * few_tokens + token).to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS + split
        tl.store(maxima_ptr + out_row, maximum, mask=is_row)
        tl.store(sums_ptr + out_row, total, mask=is_row)
        # A split without keys leaves its result unwritten.
        is_row = is_row & (begin + tl.zeros_like(rows) < end)
    dims = tl.arange(0, PADDED * CODES)
    tl.store(
        out_ptr + out_row[:, None] * HEAD_DIM + dims[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["few_tokens"])
def join_splits(
    few_tokens,
    query_start_ptr,
    part_ptr,
    maxima_ptr,
    sums_ptr,
    out_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Join one row (token and head) of a decode: the splits' results, weighted by their shares of the whole softmax."""
    request = tl.program_id(0) // few_tokens
    token = tl.program_id(0) % few_tokens
    head = tl.program_id(1)
    start = tl.load(query_start_ptr + request)
    num_tokens = tl.load(query_start_ptr + request + 1) - start
    if (token >= num_tokens) | (num_tokens > few_tokens):
        return
    row = tl.program_id(0).to(tl.int64) * NUM_HEADS + head
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    maxima = tl.load(maxima_ptr + row * NUM_SPLITS + splits)
    highest = tl.max(maxima, 0)
    pivot = tl.where(highest == float("-inf"), 0.0, highest)
    # A split that saw nothing has the maximum -inf, wrote no result and counts for nothing.
    shares = tl.exp2(maxima - pivot)
    total = tl.sum(shares * tl.load(sums_ptr + row * NUM_SPLITS + splits), 0)
    parts = tl.load(
        part_ptr + (row * NUM_SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :],
        mask=(shares > 0.0)[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(parts * shares[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    out_row = (start + token).to(tl.int64) * NUM_HEADS + head
    tl.store(out_ptr + out_row * HEAD_DIM + dims, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
