"""Paged attention on CPU: gather the context of a group into contiguous keys and values, then dense attention.

Query heads that share a key/value head are rows of one small matrix, so grouped-query attention repeats nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill_kernels.paged_attention.plan import AttentionPlan, DecodeGroup, PrefillChunk


def paged_attention(query: Tensor, cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """query: [tokens, num_heads, head_dim]; cache: one layer's. Returns [tokens, num_heads, head_dim]."""
    result = torch.empty(query.shape, dtype=query.dtype)
    for group in plan.decodes:
        result[group.rows] = _decode(query[group.rows], cache, group, plan.num_kv_heads, scale)
    for chunk in plan.prefills:
        result[chunk.start : chunk.stop] = _prefill(
            query[chunk.start : chunk.stop], cache, chunk, plan.num_kv_heads, scale
        )
    return result


def _decode(query: Tensor, cache: Tensor, group: DecodeGroup, num_kv_heads: int, scale: float) -> Tensor:
    keys, values = _gather(cache, group.gather, group.num_requests * num_kv_heads)
    num_requests, num_heads, head_dim = query.shape
    grouped = query.reshape(num_requests * num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.baddbmm(group.bias, grouped, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), values).view(num_requests, num_heads, head_dim)


def _prefill(query: Tensor, cache: Tensor, chunk: PrefillChunk, num_kv_heads: int, scale: float) -> Tensor:
    keys, values = _gather(cache, chunk.gather, num_kv_heads)
    num_tokens, num_heads, head_dim = query.shape
    group = num_heads // num_kv_heads
    # The group is the batch dimension: keys and values are expanded with stride 0 instead of repeated.
    grouped = query.view(num_tokens, num_kv_heads, group, head_dim).permute(2, 1, 0, 3)
    shape = (group, num_kv_heads, chunk.context_len, head_dim)
    attended = F.scaled_dot_product_attention(
        grouped,
        keys[:, : chunk.context_len].expand(shape),
        values[:, : chunk.context_len].expand(shape),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
    )
    return attended.permute(2, 1, 0, 3).reshape(num_tokens, num_heads, head_dim)


def _gather(cache: Tensor, rows: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
    """Keys and values, each [num_sequences, padded length, head_dim] and contiguous."""
    head_dim = cache.shape[-1]
    gathered = cache.view(-1, cache.shape[-2] * head_dim).index_select(0, rows)
    both = gathered.view(2, num_sequences, -1, head_dim)
    return both[0], both[1]
