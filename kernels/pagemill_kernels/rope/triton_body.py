"""Triton kernel that rotates queries and keys in place and writes keys and values into the paged cache, in one pass.

It can normalise each query and key first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill_kernels.gpu.triton_body import round_to_codes


@triton.jit(do_not_specialize=["eps"])
def rope_and_store(
    heads_ptr,
    query_weight_ptr,
    key_weight_ptr,
    eps,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    cache_scales_ptr,
    slots_ptr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HAS_CODES: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Process one token's heads [queries, keys, values], some at a time; a head is read and written as two halves."""
    HALF: tl.constexpr = HEAD_DIM // 2
    WIDTH: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    dims = tl.arange(0, PADDED_HALF)
    is_dim = dims < HALF
    mask = (head < WIDTH)[:, None] & is_dim[None, :]
    at = heads_ptr + (token * WIDTH + head)[:, None] * HEAD_DIM + dims[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    turns = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    if HAS_NORMS:
        is_query = (head < NUM_HEADS)[:, None]
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.where(turns, tl.rsqrt(squares / HEAD_DIM + eps)[:, None], 1.0)
        first *= scale * _weights(query_weight_ptr, key_weight_ptr, dims, is_dim, is_query, turns)
        second *= scale * _weights(query_weight_ptr + HALF, key_weight_ptr + HALF, dims, is_dim, is_query, turns)

    # y = x * cos + rotate_half(x) * sin; values stay unchanged.
    cos = tl.load(cos_ptr + token * HALF + dims, mask=is_dim, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * HALF + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    rotated_first = tl.where(turns, first * cos - second * sin, first)
    rotated_second = tl.where(turns, second * cos + first * sin, second)
    element = heads_ptr.dtype.element_ty
    tl.store(at, rotated_first.to(element), mask=mask & turns)
    tl.store(at + HALF, rotated_second.to(element), mask=mask & turns)

    # A head's part of a block: its tokens adjacent, followed by the scales of 8-bit values.
    slot = tl.load(slots_ptr + token)
    stored = mask & (head >= NUM_HEADS)[:, None]
    PART: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4) if HAS_CODES else BLOCK_SIZE * HEAD_DIM
    part = slot // BLOCK_SIZE * BLOCK_STRIDE + (head - NUM_HEADS) * PART
    to = cache_ptr + (part + slot % BLOCK_SIZE * HEAD_DIM)[:, None] + dims[None, :]
    if HAS_CODES:
        largest = tl.maximum(tl.max(tl.abs(rotated_first), 1), tl.max(tl.abs(rotated_second), 1))
        # A maximum may ignore NaN; a sum does not.
        found = largest / LARGEST + tl.sum(rotated_first * 0.0 + rotated_second * 0.0, 1)
        codable = (found > 0.0) & (found < float("inf"))
        divisor = tl.where(codable, found, 1.0)[:, None]
        scaled_first = tl.where(codable[:, None], rotated_first / divisor, 0.0)
        scaled_second = tl.where(codable[:, None], rotated_second / divisor, 0.0)
        # A quotient can be slightly beyond the largest value.
        scaled_first = tl.minimum(tl.maximum(scaled_first, -LARGEST), LARGEST)
        scaled_second = tl.minimum(tl.maximum(scaled_second, -LARGEST), LARGEST)
        tl.store(to, round_to_codes(scaled_first, IS_FP8), mask=stored)
        tl.store(to + HALF, round_to_codes(scaled_second, IS_FP8), mask=stored)
        scale_at = (part + BLOCK_SIZE * HEAD_DIM) // 4 + slot % BLOCK_SIZE
        tl.store(cache_scales_ptr + scale_at, found, mask=(head >= NUM_HEADS) & (head < WIDTH))
    else:
        cached = cache_ptr.dtype.element_ty
        tl.store(to, rotated_first.to(cached), mask=stored)
        tl.store(to + HALF, rotated_second.to(cached), mask=stored)


@triton.jit
def _weights(query_weight_ptr, key_weight_ptr, dims, is_dim, is_query, turns):
    """Return the weights of each head's norm; 1 for values."""
    query_weight = tl.load(query_weight_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    key_weight = tl.load(key_weight_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_query, query_weight, tl.where(turns, key_weight, 1.0))
