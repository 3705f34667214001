"""Attention over block tables: one kernel for prefills, decodes and both in one batch, one that joins split contexts.

A program takes a Q block: some tokens of one request times all query heads of one key/value head, so that a tile of
keys is read once for the whole group. Q blocks are numbered over the batch, with one partial block allowed per request;
a program finds its request by a binary search, so the grid follows from shapes alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
IS_OLDER = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9))
"""What these versions keep over a loop of tiles makes some decodes spill 8 bytes: it is computed anew in each tile."""


@triton.jit
def first_q_block(query_start_ptr, request, BLOCK_Q: tl.constexpr):
    """Q blocks before the request's own; each request may leave one block partly empty."""
    return tl.load(query_start_ptr + request) // BLOCK_Q + request


@triton.jit
def find_request(query_start_ptr, block, num_requests, BLOCK_Q: tl.constexpr):
    """The last request whose first Q block is not behind `block`."""
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
    """The part of a context that one split reads, in whole tiles; empty where the context is too short to be split."""
    used = tl.minimum(tl.maximum(tl.cdiv(upper - lower, SPLIT_TOKENS), 1), NUM_SPLITS)
    tokens = tl.cdiv(tl.cdiv(upper - lower, TILE), used) * TILE
    return lower + split * tokens, tl.minimum(lower + (split + 1) * tokens, upper)


@triton.jit(do_not_specialize=["num_requests", "window", "scale", "soft_cap", "table_stride"])
def attend(
    num_requests,
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
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CODES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = softmax(q k^T * scale + mask) v, or with splits the parts of it that `join_splits` needs."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request = find_request(query_start_ptr, block, num_requests, BLOCK_Q)
    start = tl.load(query_start_ptr + request)
    num_tokens = tl.load(query_start_ptr + request + 1) - start
    first = (block - first_q_block(query_start_ptr, request, BLOCK_Q)) * BLOCK_Q
    if first >= num_tokens:
        return

    # Rows of the tile: the group's heads of the first token, then of the second, and so on.
    rows = tl.arange(0, BLOCK_M)
    token = first + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (token < num_tokens)
    seq_len = tl.load(seq_lens_ptr + request)
    context = seq_len - num_tokens
    # Rows beyond the request compute the last token's mask, so that nothing in them can become NaN.
    position = context + tl.minimum(token, num_tokens - 1)
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    row_token = (start + token).to(tl.int64)
    query = tl.load(
        query_ptr + row_token[:, None] * query_stride + head[:, None] * HEAD_DIM + dims[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )

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
    PART: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4) if HAS_CODES else BLOCK_SIZE * HEAD_DIM
    maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SINKS:
        # A score that has no value; of several splits the first one, which always has keys, counts it.
        sinks = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        maximum = tl.where(split == 0, sinks, maximum)
        total = tl.where(split == 0, 1.0, total)
    result = tl.zeros([BLOCK_M, PADDED_DIM], dtype=tl.float32)
    COMPUTES_ANEW: tl.constexpr = IS_OLDER and BLOCK_M < 64 and NUM_SPLITS == 1 and not HAS_CODES
    for tile in tl.range(begin, end, TILE, disable_licm=COMPUTES_ANEW):
        key_position = tile + tl.arange(0, TILE)
        is_key = (key_position >= first_visible) & (key_position < end)
        block_id = tl.load(
            table_ptr + request.to(tl.int64) * table_stride + key_position // BLOCK_SIZE, mask=is_key, other=0
        ).to(tl.int64)
        part = (block_id * (2 * NUM_KV_HEADS) + kv_head) * PART
        offset = part + (key_position % BLOCK_SIZE) * HEAD_DIM
        keys = tl.load(cache_ptr + offset[None, :] + dims[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        scores = tl.dot(query, keys.to(query.dtype), input_precision=PRECISION) * scale
        if HAS_CODES:
            scale_at = (part + BLOCK_SIZE * HEAD_DIM) // 4 + key_position % BLOCK_SIZE
            scores *= tl.load(cache_scales_ptr + scale_at, mask=is_key, other=0.0)[None, :]
        if HAS_SOFT_CAP:
            # cap * tanh(s / cap), with tanh(x) = 2 sigmoid(2x) - 1.
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        if HAS_SLOPES:
            scores += slopes[:, None] * (key_position[None, :] - position[:, None])
        visible = is_key[None, :] & (key_position[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible &= key_position[None, :] > position[:, None] - window
        scores = tl.where(visible, scores * LOG2E, float("-inf"))

        # Softmax over what was seen so far: rescale the old sum and result to the new maximum.
        highest = tl.maximum(maximum, tl.max(scores, 1))
        pivot = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - pivot[:, None])
        shrink = tl.exp2(maximum - pivot)
        total = total * shrink + tl.sum(weights, 1)
        maximum = highest
        value_offset = offset + NUM_KV_HEADS * PART
        values = tl.load(
            cache_ptr + value_offset[:, None] + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0
        )
        if HAS_CODES:
            value_scale_at = (part + (NUM_KV_HEADS * PART + BLOCK_SIZE * HEAD_DIM)) // 4 + key_position % BLOCK_SIZE
            weights *= tl.load(cache_scales_ptr + value_scale_at, mask=is_key, other=0.0)[None, :]
        weights = weights.to(query.dtype)
        result = result * shrink[:, None]
        result = tl.dot(weights, values.to(query.dtype), acc=result, input_precision=PRECISION)

    if NUM_SPLITS == 1:
        result = result / tl.where(total > 0.0, total, 1.0)[:, None]
        out_row = row_token * NUM_HEADS + head
    else:
        out_row = (row_token * NUM_HEADS + head) * NUM_SPLITS + split
        tl.store(maxima_ptr + out_row, maximum, mask=is_row)
        tl.store(sums_ptr + out_row, total, mask=is_row)
        # A split without keys leaves its result unwritten.
        is_row = is_row & (begin + tl.zeros_like(rows) < end)
    tl.store(
        out_ptr + out_row[:, None] * HEAD_DIM + dims[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_dim[None, :],
    )


@triton.jit
def join_splits(
    part_ptr,
    maxima_ptr,
    sums_ptr,
    out_ptr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """One row (token and head): the splits' results, each weighted by its share of the whole softmax."""
    row = tl.program_id(0).to(tl.int64)
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
    tl.store(out_ptr + row * HEAD_DIM + dims, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
