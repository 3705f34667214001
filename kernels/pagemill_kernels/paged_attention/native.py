"""Paged attention in C++ directly over the block tables: nothing is gathered, padded or repeated."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from pagemill_kernels import arrays
from pagemill_kernels.arrays import Array, address, optional_address
from pagemill_kernels.cpu import launch, library
from pagemill_kernels.kv_store import kinds
from pagemill_kernels.paged_attention.batch import AttentionBatch

MAX_HEAD_DIM = 576
MAX_GROUP = 48


@dataclass(slots=True, frozen=True)
class NativePlan:
    """Arguments that all layers share, and the arrays they point to."""

    args: library.AttentionArgs
    arrays: tuple[object, ...]


def supports(head_dim: int, block_size: int, group: int) -> bool:
    """Whether the kernel supports a model. `group`: number of query heads that share a key/value head."""
    return head_dim <= MAX_HEAD_DIM and block_size % 16 == 0 and group <= MAX_GROUP


def plan_attention(batch: AttentionBatch, sliding_window: int | None) -> NativePlan:
    """Plan attention for all layers with this sliding window (None: full attention)."""
    query_start_loc = np.ascontiguousarray(batch.query_start_loc, dtype=np.int64)
    seq_lens = np.ascontiguousarray(batch.seq_lens, dtype=np.int64)
    tables = np.ascontiguousarray(batch.block_tables, dtype=np.int32)
    args = library.AttentionArgs(
        block_tables=address(tables),
        query_start_loc=address(query_start_loc),
        seq_lens=address(seq_lens),
        block_table_stride=tables.shape[1],
        num_requests=batch.num_requests,
        block_size=batch.block_size,
        sliding_window=sliding_window or 0,
        first_key=batch.first_key,
        num_threads=launch.num_threads(),
    )
    return NativePlan(args, (query_start_loc, seq_lens, tables))


def plan_invariant_attention(batch: AttentionBatch, sliding_window: int | None) -> NativePlan:
    """Plan batch-invariant attention: a token's result has the same bits in every batch and every chunk."""
    plan = plan_attention(batch, sliding_window)
    plan.args.batch_invariant = 1
    return plan


def plan_bfloat16_attention(batch: AttentionBatch, sliding_window: int | None) -> NativePlan:
    """Plan attention that multiplies in bfloat16, unless the cache is float32."""
    plan = plan_attention(batch, sliding_window)
    plan.args.bfloat16 = 1
    return plan


def paged_attention(
    query: Array,
    cache: Array,
    plan: NativePlan,
    scale: float,
    soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
) -> Array:
    """Compute attention and return [tokens, num_heads, head_dim].

    query: float32 [tokens, num_heads, head_dim]; cache: one layer's, each block contiguous. Others: as in `reference`.
    """
    num_tokens, num_heads, head_dim = query.shape
    if query.strides[1:] != (head_dim * query.itemsize, query.itemsize):
        query = np.ascontiguousarray(query)
    out = arrays.empty((num_tokens, num_heads, head_dim))
    args = plan.args
    args.query = address(query)
    args.query_stride = launch.row_stride(query)
    args.cache = address(cache)
    args.cache_type = kinds.native_number(cache)
    args.block_stride = cache.strides[0]
    args.num_kv_heads, args.head_dim = cache.shape[1] // 2, head_dim
    args.out = address(out)
    args.sinks = optional_address(sinks)
    args.alibi_slopes = optional_address(alibi_slopes)
    args.soft_cap = soft_cap or 0.0
    args.num_heads = num_heads
    args.scale = scale
    launch.native().pagemill_paged_attention(ctypes.byref(args))
    return out
