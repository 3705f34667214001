"""Launches paged attention on a GPU: a step's decodes, whose long contexts are split, and concurrently its prefills.

Grids follow from the numbers of tokens and requests alone, and the device decides how many splits a context has, so
recorded launches serve every step of the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from pagemill_kernels.gpu import launch
from pagemill_kernels.kv_store.storage import LARGEST_CODES, token_width
from pagemill_kernels.paged_attention import triton_body
from pagemill_kernels.paged_attention.batch import DECODE_LIMIT, AttentionBatch
from pagemill_kernels.paged_attention.tiles import SPLIT_TOKENS, AttentionTiles, choose_splits, choose_tiles
from pagemill_kernels.request_rows.layout import DeviceStepInputs

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 512
MAX_GROUP = 64


@dataclass(slots=True, frozen=True)
class TritonPlan:
    """A step's batch on the device, and the launch arguments of every layer."""

    query_start_loc: Tensor
    """int32 [requests + 1]."""
    seq_lens: Tensor
    """int32 [requests]."""
    block_tables: Tensor
    """int32 [requests, blocks]."""
    num_tokens: int
    block_size: int
    sliding_window: int | None
    longest: int
    """Tokens of the request that has most tokens in the step."""
    has_few: bool
    """Whether some requests may be decodes."""
    first_key: int = 0
    """Tokens of a context before this one are not attended to, but by themselves."""

    def __post_init__(self) -> None:
        num_requests = len(self.seq_lens)
        indices = {name: getattr(self, name) for name in ("block_tables", "query_start_loc", "seq_lens")}
        launch.check_types("paged attention", torch.int32, **indices)
        launch.check_contiguous("paged attention", **indices)
        launch.check_shape("paged attention", "query_start_loc", self.query_start_loc, (num_requests + 1,))
        if len(self.block_tables) != num_requests:
            raise ValueError(f"paged attention: {len(self.block_tables)} block tables for {num_requests} requests")


def supports(head_dim: int, block_size: int, group: int) -> str | None:
    """Return why a model is not supported, and the remedy; None if it is.

    `group`: number of query heads that share a key/value head.
    """
    if head_dim % 16 or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return f"heads of {head_dim}; multiples of 16 up to {MAX_HEAD_DIM} are supported. Set device to cpu"
    if block_size % 16:
        below = block_size // 16 * 16
        nearest = f"{below} or {below + 16}" if below else "16"
        return f"blocks of {block_size} tokens; multiples of 16 are supported. Set block_size to {nearest}"
    if group > MAX_GROUP:
        return f"{group} query heads for each key/value head; up to {MAX_GROUP} are supported. Set device to cpu"
    return None


def plan_attention(
    batch: AttentionBatch, sliding_window: int | None, dtype: torch.dtype, device: torch.device
) -> TritonPlan:
    """Plan attention for all layers with this sliding window (None: full attention)."""
    num_tokens = np.diff(batch.query_start_loc)
    return TritonPlan(
        query_start_loc=launch.upload(batch.query_start_loc, device, torch.int32),
        seq_lens=launch.upload(batch.seq_lens, device, torch.int32),
        block_tables=launch.upload(batch.block_tables, device, torch.int32),
        num_tokens=int(batch.query_start_loc[-1]),
        block_size=batch.block_size,
        sliding_window=sliding_window,
        longest=int(num_tokens.max(initial=0)),
        has_few=bool(((num_tokens > 0) & (num_tokens <= DECODE_LIMIT)).any()),
        first_key=batch.first_key,
    )


def plan_on_device(
    inputs: DeviceStepInputs,
    num_requests: int,
    longest: int,
    kind: int,
    sliding_window: int | None,
    block_size: int,
    first_key: int = 0,
) -> TritonPlan:
    """Plan attention for inputs that are on the device.

    `longest`: tokens of the request that has most tokens; `kind`: number of the layers' cache kind; `first_key`: as in
    `TritonPlan`.
    """
    return TritonPlan(
        query_start_loc=inputs.query_start_loc[: num_requests + 1],
        seq_lens=inputs.seq_lens[:num_requests],
        block_tables=inputs.block_tables[kind, :num_requests],
        num_tokens=len(inputs.token_ids),
        block_size=block_size,
        sliding_window=sliding_window,
        longest=longest,
        has_few=longest <= DECODE_LIMIT or num_requests > 1,
        first_key=first_key,
    )


def paged_attention(
    query: Tensor,
    cache: Tensor,
    plan: TritonPlan,
    scale: float,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention and return [tokens, num_heads, head_dim].

    query: [tokens, num_heads, head_dim]; cache: one layer's. `soft_cap`: scores become cap * tanh(score / cap).
    `alibi_slopes`: float32 [num_heads]; a key n tokens back loses slope * n. `sinks`: float32 [num_heads]; scores of
    keys without a value.
    """
    num_tokens, num_heads, head_dim = query.shape
    _check(query, cache, plan, alibi_slopes=alibi_slopes, sinks=sinks)
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    if query.stride()[1:] != (head_dim, 1):
        query = query.contiguous()
    num_kv_heads = cache.shape[1] // 2
    group = num_heads // num_kv_heads
    decode_tiles, prefill_tiles = (
        choose_tiles(head_dim, group, query.dtype, cache.dtype, is_decode) for is_decode in (True, False)
    )
    has_prefills = plan.longest > DECODE_LIMIT
    few_tokens = plan.longest if not has_prefills else decode_tiles.block_m // group if plan.has_few else 0
    extras = _Extras(scale, soft_cap, alibi_slopes, sinks)
    parts = _parts(few_tokens, decode_tiles, plan, num_kv_heads, out)
    decode = partial(_decode, few_tokens, decode_tiles, plan, query, cache, extras, parts, out)
    q_blocks = num_tokens // (prefill_tiles.block_m // group) + len(plan.seq_lens)
    whole = _Parts(q_blocks, 1, out, out, out)
    prefill = partial(_attend, False, few_tokens, prefill_tiles, plan, query, cache, extras, whole)
    if has_prefills and few_tokens:
        # Prefills are bound by computation and decodes by memory: concurrently they take less time than in sequence.
        with launch.forked(out.device) as other_stream:
            with other_stream:
                decode()
            prefill()
    elif has_prefills:
        prefill()
    else:
        decode()
    return out


class _Extras(NamedTuple):
    """Changes of the scores besides the causal mask and the window."""

    scale: float
    soft_cap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


class _Parts(NamedTuple):
    """Size and outputs of a launch."""

    q_blocks: int
    num_splits: int
    results: Tensor
    maxima: Tensor
    """Only read for split contexts, like the sums."""
    sums: Tensor


def _parts(few_tokens: int, tiles: AttentionTiles, plan: TritonPlan, num_kv_heads: int, out: Tensor) -> _Parts:
    """Return the size and outputs of the decodes' launch; every request has `few_tokens` rows in them."""
    _, num_heads, head_dim = out.shape
    num_requests = len(plan.seq_lens)
    q_blocks = num_requests * triton.cdiv(few_tokens, tiles.block_m // (num_heads // num_kv_heads))
    num_splits = choose_splits(q_blocks * num_kv_heads)
    if num_splits == 1 or not few_tokens:
        return _Parts(q_blocks, 1, out, out, out)
    shape = (num_requests * few_tokens, num_heads, num_splits)
    sizes = torch.empty(2, *shape, dtype=torch.float32, device=out.device)
    results = torch.empty(*shape, head_dim, dtype=torch.float32, device=out.device)
    return _Parts(q_blocks, num_splits, results, sizes[0], sizes[1])


def _decode(
    few_tokens: int,
    tiles: AttentionTiles,
    plan: TritonPlan,
    query: Tensor,
    cache: Tensor,
    extras: _Extras,
    parts: _Parts,
    out: Tensor,
) -> None:
    _, num_heads, head_dim = query.shape
    _attend(True, few_tokens, tiles, plan, query, cache, extras, parts)
    if parts.num_splits > 1:
        triton_body.join_splits[(len(plan.seq_lens) * few_tokens, num_heads)](
            few_tokens=few_tokens,
            query_start_ptr=plan.query_start_loc,
            part_ptr=parts.results,
            maxima_ptr=parts.maxima,
            sums_ptr=parts.sums,
            out_ptr=out,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            NUM_SPLITS=parts.num_splits,
            enable_fp_fusion=True,
            num_warps=4,
        )


def _attend(
    is_decode: bool,
    few_tokens: int,
    tiles: AttentionTiles,
    plan: TritonPlan,
    query: Tensor,
    cache: Tensor,
    extras: _Extras,
    parts: _Parts,
) -> None:
    _, num_heads, head_dim = query.shape
    num_kv_heads = cache.shape[1] // 2
    has_codes = cache.dtype in LARGEST_CODES
    flat = cache[0].flatten() if has_codes else cache  # of another type: only the address counts
    triton_body.attend[(parts.q_blocks, num_kv_heads, parts.num_splits)](
        num_requests=len(plan.seq_lens),
        few_tokens=few_tokens,
        window=plan.sliding_window or 0,
        scale=extras.scale,
        soft_cap=extras.soft_cap or 0.0,
        query_ptr=query,
        query_stride=query.stride(0),
        cache_ptr=flat.view(torch.int16) if has_codes else cache,
        cache_scales_ptr=flat.view(torch.float32) if has_codes else cache,
        table_ptr=plan.block_tables,
        table_stride=plan.block_tables.stride(0),
        query_start_ptr=plan.query_start_loc,
        seq_lens_ptr=plan.seq_lens,
        slopes_ptr=query if extras.alibi_slopes is None else extras.alibi_slopes,
        sinks_ptr=query if extras.sinks is None else extras.sinks,
        out_ptr=parts.results,
        maxima_ptr=parts.maxima,
        sums_ptr=parts.sums,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=plan.block_size,
        BLOCK_STRIDE=cache.stride(0) // 2 if has_codes else cache.stride(0),
        BLOCK_M=tiles.block_m,
        TILE=tiles.tile,
        NUM_SPLITS=parts.num_splits,
        SPLIT_TOKENS=SPLIT_TOKENS,
        IS_DECODE=is_decode,
        HAS_WINDOW=plan.sliding_window is not None,
        HAS_SOFT_CAP=extras.soft_cap is not None,
        HAS_SLOPES=extras.alibi_slopes is not None,
        HAS_SINKS=extras.sinks is not None,
        HAS_CODES=has_codes,
        IS_FP8=cache.dtype == torch.float8_e4m3fn,
        PRECISION=precision(query.dtype),
        FIRST_KEY=plan.first_key,
        enable_fp_fusion=True,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def precision(dtype: torch.dtype) -> str:
    """Return tl.dot's precision. float32 stays float32: tensor cores would round it to 10 bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


def _check(query: Tensor, cache: Tensor, plan: TritonPlan, **by_head: Tensor | None) -> None:
    num_tokens, num_heads, head_dim = query.shape
    launch.check_floats("paged attention", query=query)
    launch.check_blocks("paged attention", cache)
    if cache.dtype not in LARGEST_CODES:
        launch.check_floats("paged attention", query=query, cache=cache)
    num_kv_heads = cache.shape[1] // 2
    shape = (2 * num_kv_heads, plan.block_size, token_width(cache.dtype, head_dim))
    launch.check_shape("paged attention", "cache", cache, (len(cache), *shape))
    if num_tokens != plan.num_tokens or num_heads % num_kv_heads:
        raise ValueError(
            f"paged attention: query has {num_tokens} tokens and {num_heads} heads, the plan {plan.num_tokens} tokens "
            f"and the cache {num_kv_heads} key/value heads"
        )
    problem = supports(head_dim, plan.block_size, num_heads // num_kv_heads)
    if problem is not None:
        raise ValueError(f"paged attention: {problem}")
    for name, values in by_head.items():
        if values is not None:
            launch.check_shape("paged attention", name, values, (num_heads,))
            launch.check_floats("paged attention", query=query, **{name: values})
            launch.check_contiguous("paged attention", **{name: values})
    if {query.device, cache.device} != {plan.seq_lens.device}:
        raise ValueError(
            f"paged attention: query, cache and plan lie on {query.device}, {cache.device} and {plan.seq_lens.device}; "
            "one device is needed"
        )
