"""The formula of attention, one request at a time: softmax(q k^T * scale + mask) v over the gathered context.

A token at position p sees the positions from max(0, p - sliding_window + 1) to p. Query head h reads key/value head h

(num_heads / num_kv_heads). A soft cap bends scores; ALiBi (arXiv 2108.12409) lowers them with distance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill_kernels.paged_attention.batch import AttentionBatch, kv_heads_of


@dataclass(slots=True, frozen=True)
class ReferencePlan:
    batch: AttentionBatch
    sliding_window: int | None


def plan_attention(
    batch: AttentionBatch, sliding_window: int | None, dtype: torch.dtype, device: torch.device
) -> ReferencePlan:
    return ReferencePlan(batch, sliding_window)


def paged_attention(
    query: Tensor,
    cache: Tensor,
    plan: ReferencePlan,
    scale: float,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention and return query's shape and type.

    query: [tokens, num_heads, head_dim]; cache: one layer's. `soft_cap`: scores become cap * tanh(score / cap).
    `alibi_slopes`: float32 [num_heads]; a key n tokens back loses slope * n. `sinks`: float32 [num_heads], for each
    head the score of a key without a value, which takes its share of the softmax. If the cache has one vector for each
    token, values are the keys, and the caller takes the part of the result that it needs.
    """
    batch = plan.batch
    result = torch.empty_like(query)
    for i in range(batch.num_requests):
        start, stop = int(batch.query_start_loc[i]), int(batch.query_start_loc[i + 1])
        seq_len = int(batch.seq_lens[i])
        keys, values = _gather(cache, batch, i, seq_len)
        group = query.shape[1] // len(keys)
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        positions = torch.arange(seq_len - (stop - start), seq_len, device=query.device)
        visible = visible_positions(positions, seq_len, plan.sliding_window)
        visible[:, : batch.first_key] = False
        scores = query[start:stop].transpose(0, 1).float() @ keys.float().transpose(1, 2) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if alibi_slopes is not None:
            distance = torch.arange(seq_len, device=query.device) - positions[:, None]
            scores = scores + alibi_slopes.float()[:, None, None] * distance
        weights = softmax_with_sinks(scores.masked_fill(~visible, float("-inf")), sinks)
        result[start:stop] = (weights @ values.float()).transpose(0, 1).to(query.dtype)
    return result


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the context's part of the softmax over it and the head's sink. scores: [heads, rows, context]."""
    if sinks is None:
        return scores.softmax(-1)
    sink_scores = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, sink_scores], -1).softmax(-1)[..., :-1]


def visible_positions(positions: Tensor, seq_len: int, sliding_window: int | None) -> Tensor:
    """Return which context each position may read, bool [len(positions), seq_len]."""
    context = torch.arange(seq_len, device=positions.device)
    visible = context <= positions[:, None]
    if sliding_window is not None:
        visible &= context > positions[:, None] - sliding_window
    return visible


def _gather(cache: Tensor, batch: AttentionBatch, request: int, seq_len: int) -> tuple[Tensor, Tensor]:
    num_blocks = -(-seq_len // batch.block_size)
    blocks = torch.from_numpy(batch.block_tables[request, :num_blocks].astype("int64")).to(cache.device)
    tokens = cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len]
    num_kv_heads = kv_heads_of(cache.shape[1])
    return tokens[:num_kv_heads], tokens[-num_kv_heads:]
