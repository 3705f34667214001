"""Batches for attention tests: tokens and lengths of requests whose blocks are scattered over a pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pagemill_kernels.paged_attention.batch import AttentionBatch


@dataclass(slots=True, frozen=True)
class ShapedBatch(AttentionBatch):
    """A batch, and the shape of the heads in the cache that a test makes for it."""

    num_kv_heads: int
    head_dim: int


Tables = np.ndarray[tuple[int, int], np.dtype[np.int32]]
Lengths = list[tuple[int, int]]
"""(tokens of this step, sequence length) of each request."""


def batch_of(
    lengths: Lengths,
    tables: Tables,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    *,
    padding_block: int = 0,
) -> ShapedBatch:
    return ShapedBatch(
        query_start_loc=np.concatenate(([0], np.cumsum([tokens for tokens, _ in lengths]))),
        seq_lens=np.array([seq_len for _, seq_len in lengths], dtype=np.int64),
        block_tables=tables,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        padding_block=padding_block,
    )


def after_context(lengths: Iterable[tuple[int, int]]) -> Lengths:
    """Convert (tokens of this step, tokens before them) to lengths."""
    return [(new, new + context) for new, context in lengths]


def scattered_tables(
    lengths: Lengths, num_blocks: int, block_size: int = 16, seeds: Iterable[int] | None = None
) -> Tables:
    """Return tables of requests that share blocks; each seed determines a table's start, whatever its length.

    A table that is longer than the pool repeats it.
    """
    width = max(1, -(-max(seq_len for _, seq_len in lengths) // block_size))
    orders = [np.random.default_rng(seed).permutation(num_blocks) for seed in seeds or range(len(lengths))]
    return np.stack([np.resize(order, width) for order in orders]).astype(np.int32)
