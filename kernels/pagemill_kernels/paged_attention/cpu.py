"""Paged attention with torch on the CPU: gathers a group's context into contiguous keys and values, then attends.

Query heads that share a key/value head are rows of one small matrix, so grouped-query attention repeats nothing. With a
soft cap, ALiBi or sinks, scores are written out, one key/value head of a chunk at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill_kernels.paged_attention.batch import kv_heads_of
from pagemill_kernels.paged_attention.plan import AttentionPlan, DecodeGroup, PrefillChunk
from pagemill_kernels.paged_attention.reference import softmax_with_sinks


class _Extras(NamedTuple):
    """The optional arguments of `paged_attention`."""

    soft_cap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


def paged_attention(
    query: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention and return a tensor like query.

    query: [tokens, num_heads, head_dim]; cache: one layer's, of any float type. `soft_cap`, `alibi_slopes`, `sinks`: as
    in `reference`.
    """
    extras = _Extras(soft_cap, alibi_slopes, sinks)
    result = torch.empty(query.shape, dtype=query.dtype)
    for group in plan.decodes:
        result[group.rows] = _decode(query[group.rows], cache, group, scale, extras)
    for chunk in plan.prefills:
        rows = query[chunk.start : chunk.stop]
        if all(extra is None for extra in extras):
            attended = _prefill(rows, cache, chunk, scale)
        else:
            attended = _written_out_prefill(rows, cache, chunk, scale, extras)
        result[chunk.start : chunk.stop] = attended
    return result


def _decode(query: Tensor, cache: Tensor, group: DecodeGroup, scale: float, extras: _Extras) -> Tensor:
    keys, values = _gather(cache, group.blocks, query.dtype)
    num_requests, num_heads, head_dim = query.shape
    num_kv_heads = len(keys) // num_requests
    # Memory that held states may have bits that are no numbers, which a weight of zero would not remove.
    requests, places = group.unwritten
    for each in (keys,) if keys is values else (keys, values):
        each.view(num_requests, num_kv_heads, -1, head_dim)[requests, :, places] = 0
    bias = group.bias.repeat_interleave(num_kv_heads, 0)
    grouped = query.reshape(num_requests * num_kv_heads, num_heads // num_kv_heads, head_dim)
    soft_cap, alibi_slopes, sinks = extras
    if soft_cap is None and alibi_slopes is None:
        scores = torch.baddbmm(bias, grouped, keys.transpose(1, 2), alpha=scale)
    else:
        scores = _capped(torch.bmm(grouped, keys.transpose(1, 2)).float().mul_(scale), soft_cap) + bias
    if alibi_slopes is not None:
        lowered = alibi_slopes.view(1, num_kv_heads, -1, 1) * group.distances()[:, None, None, :]
        scores += lowered.flatten(0, 1)
    by_head = scores.view(num_requests, num_heads, -1).transpose(0, 1)
    weights = softmax_with_sinks(by_head, sinks).transpose(0, 1).reshape(scores.shape).to(query.dtype)
    return torch.bmm(weights, values).view(num_requests, num_heads, head_dim)


def _prefill(query: Tensor, cache: Tensor, chunk: PrefillChunk, scale: float) -> Tensor:
    keys, values = _gather(cache, chunk.blocks, query.dtype)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = len(keys)
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


def _written_out_prefill(query: Tensor, cache: Tensor, chunk: PrefillChunk, scale: float, extras: _Extras) -> Tensor:
    soft_cap, alibi_slopes, sinks = extras
    keys, values = _gather(cache, chunk.blocks, query.dtype)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = len(keys)
    by_kv_head = query.reshape(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    distances = chunk.distances()
    # Without a mask the chunk is plainly causal.
    mask = torch.where(distances > 0, float("-inf"), 0.0) if chunk.mask is None else chunk.mask
    slopes = None if alibi_slopes is None else alibi_slopes.view(num_kv_heads, -1, 1, 1)
    attended = torch.empty(num_kv_heads, num_heads // num_kv_heads, num_tokens, head_dim, dtype=query.dtype)
    for head, rows in enumerate(by_kv_head):
        scores = _capped((rows @ keys[head, : chunk.context_len].t()).float().mul_(scale), soft_cap)
        scores = scores if slopes is None else scores.add_(slopes[head] * distances)
        of_head = None if sinks is None else sinks.view(num_kv_heads, -1)[head]
        weights = softmax_with_sinks(scores.add_(mask), of_head).to(query.dtype)
        attended[head] = weights @ values[head, : chunk.context_len]
    return attended.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def _capped(scores: Tensor, soft_cap: float | None) -> Tensor:
    return scores if soft_cap is None else scores.div_(soft_cap).tanh_().mul_(soft_cap)


def _gather(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values, each [requests * num_kv_heads, padded length, head_dim] and contiguous.

    blocks: [requests, blocks]. If the cache has one vector for both, they are the same tensor.
    """
    num_kv_heads, head_dim = kv_heads_of(cache.shape[1]), cache.shape[-1]
    heads = torch.arange(cache.shape[1]).view(-1, 1, num_kv_heads, 1)
    gathered = cache[blocks[None, :, None, :], heads].to(dtype)
    parts = gathered.view(-1, len(blocks) * num_kv_heads, blocks.shape[1] * cache.shape[2], head_dim)
    return parts[0], parts[-1]
