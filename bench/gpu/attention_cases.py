"""Attention over block tables: decodes, prefills and both, compared with torch and, if importable, two libraries.

torch's peers read contiguous keys and values without a table, which is an advantage for them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from case import Case, Run, prepared
from measuring import Device

from pagemill_kernels.gpu import launch
from pagemill_kernels.kv_store import storage
from pagemill_kernels.paged_attention import reference, triton_launch
from pagemill_kernels.paged_attention.batch import AttentionBatch

BLOCK_SIZE = 16
ENCODED_BLOCKS = 1024
"""Blocks that are encoded at a time: their float values are several times as large."""


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Inputs(NamedTuple):
    shape: Shape
    lengths: list[tuple[int, int]]
    """(tokens of this step, sequence length) of each request."""
    query: torch.Tensor
    cache: torch.Tensor
    batch: AttentionBatch

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.shape.head_dim)


def cases(device: Device) -> list[Case]:
    if device.tiny:
        tiny = Shape(4, 2, 16)
        given = inputs(device, tiny, [(1, 20), (5, 9)])
        uniform = [_uniform(device, f"2 x {tokens}", tiny, 2, tokens, seq_len) for tokens, seq_len in ((1, 20), (9, 9))]
        return [_mixed(device, "mixed", given, 1), *_in_codes(device, "mixed", given), *uniform]
    gqa8, gqa4, gqa2 = Shape(64, 8, 128), Shape(32, 8, 128), Shape(16, 8, 128)
    decodes = {"GQA 8": gqa8, "GQA 4 (Llama-3.1-8B)": gqa4, "GQA 2 (Qwen3-0.6B)": gqa2}
    found = [
        *(_uniform(device, f"decode, 128 x 4k, {name}", shape, 128, 1, 4096) for name, shape in decodes.items()),
        _uniform(device, "decode, 1 x 32k, GQA 4", gqa4, 1, 1, 32_768),
        _uniform(device, "prefill, 1 x 8k, GQA 4", gqa4, 1, 8192, 8192),
        _uniform(device, "prefill, 8 x 1k, GQA 4", gqa4, 8, 1024, 1024),
    ]
    mixed = inputs(device, gqa4, [*[(1, 4096)] * 64, (2048, 4096)])
    found.append(_mixed(device, "64 decodes at 4k and a chunk of 2k in one launch", mixed, 64))
    decode = inputs(device, gqa4, [(1, 4096)] * 128)
    return [*found, *_in_codes(device, "decode, 128 x 4k, GQA 4", decode)]


def inputs(device: Device, shape: Shape, lengths: list[tuple[int, int]]) -> Inputs:
    """Return inputs whose blocks are scattered over a pool that holds only them."""
    widths = [-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths]
    order = np.random.default_rng(0).permutation(sum(widths)).astype(np.int32)
    tables = np.zeros((len(lengths), max(widths)), dtype=np.int32)
    start = 0
    for row, width in zip(tables, widths, strict=True):
        row[:width] = order[start : start + width]
        start += width
    num_tokens = sum(tokens for tokens, _ in lengths)
    return Inputs(
        shape,
        lengths,
        query=device.random(num_tokens, shape.num_heads, shape.head_dim),
        cache=device.random(start, 2 * shape.num_kv_heads, BLOCK_SIZE, shape.head_dim, seed=1),
        batch=AttentionBatch(
            query_start_loc=np.concatenate(([0], np.cumsum([tokens for tokens, _ in lengths]))),
            seq_lens=np.array([seq_len for _, seq_len in lengths], dtype=np.int64),
            block_tables=tables,
            block_size=BLOCK_SIZE,
            padding_block=0,
        ),
    )


def _mixed(device: Device, name: str, given: Inputs, num_decodes: int) -> Case:
    """Return a case of decodes and chunks of prompts in one launch, compared with one launch per kind."""
    case = _case(device, name, given)
    apart = [_ours(_part(given, 0, num_decodes)), _ours(_part(given, num_decodes, len(given.lengths)))]
    case.peers["pagemill, two launches"] = lambda: torch.cat([run() for run in apart])
    return case


def _part(given: Inputs, begin: int, end: int) -> Inputs:
    """Return some of the requests, over the same cache."""
    batch, starts = given.batch, given.batch.query_start_loc
    return given._replace(
        lengths=given.lengths[begin:end],
        query=given.query[starts[begin] : starts[end]],
        batch=replace(
            batch,
            query_start_loc=starts[begin : end + 1] - starts[begin],
            seq_lens=batch.seq_lens[begin:end],
            block_tables=batch.block_tables[begin:end],
        ),
    )


def _uniform(device: Device, name: str, shape: Shape, requests: int, tokens: int, seq_len: int) -> Case:
    """Return a case of equal requests, which torch's attention can compute in one call."""
    given = inputs(device, shape, [(tokens, seq_len)] * requests)
    case = _case(device, name, given)
    queries = given.query.view(requests, tokens, shape.num_heads, shape.head_dim).transpose(1, 2).contiguous()
    keys, values = _side_by_side(given)
    causal = tokens > 1

    def flat(run: Callable[[], torch.Tensor]) -> Run:
        return lambda: run().transpose(1, 2).reshape(given.query.shape)

    case.peers["torch SDPA"] = flat(
        lambda: F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=True)
    )
    if device.on_gpu:
        case.peers["cuDNN"] = flat(lambda: _by_cudnn(queries, keys, values, causal))
    case.peers["torch FlexAttention"] = flat(prepared(lambda: _flex(queries, keys, values, causal)))
    if importlib.util.find_spec("flash_attn") is not None:
        case.peers["FlashAttention"] = prepared(lambda: _flash_attention(given, keys, values, causal))
    if importlib.util.find_spec("vllm") is not None and device.on_gpu:
        case.peers["FlashAttention 3 with vLLM's block tables"] = prepared(
            lambda: _paged_flash_attention(given, causal)
        )
    if importlib.util.find_spec("flashinfer") is not None:
        case.peers["FlashInfer"] = prepared(lambda: _flashinfer(given, tokens))
    return case


def _case(device: Device, name: str, given: Inputs) -> Case:
    shape, cache = given.shape, given.cache
    plan = reference.plan_attention(given.batch, None, device.dtype, device.device)
    # A token at position p attends to p + 1 keys; there are two matmuls of two operations each.
    seen = sum(tokens * seq_len - tokens * (tokens - 1) // 2 for tokens, seq_len in given.lengths)
    return Case(
        name,
        _ours(given),
        lambda: reference.paged_attention(given.query, _decoded(cache), plan, given.scale),
        num_bytes=2 * given.query.nbytes + cache.nbytes,
        num_flops=4 * seen * shape.num_heads * shape.head_dim,
    )


def _in_codes(device: Device, name: str, given: Inputs) -> list[Case]:
    """Return the same keys and values in each 8-bit type that the device supports."""
    return [
        _case(device, f"{name}, {kind} cache", given._replace(cache=_encoded(given.cache, dtype)))
        for kind, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn))
        if kind == "int8" or launch.fp8_problem() is None
    ]


def _encoded(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    width = storage.token_width(dtype, cache.shape[3])
    encoded = torch.empty(*cache.shape[:3], width, dtype=dtype, device=cache.device)
    for start in range(0, len(cache), ENCODED_BLOCKS):
        piece = slice(start, start + ENCODED_BLOCKS)
        storage.write_blocks(encoded[piece], cache[piece].float())
    return encoded


def _ours(given: Inputs) -> Run:
    plan = triton_launch.plan_attention(given.batch, None, given.query.dtype, given.query.device)
    return lambda: triton_launch.paged_attention(given.query, given.cache, plan, given.scale)


def _decoded(cache: torch.Tensor) -> torch.Tensor:
    return storage.decode(cache) if cache.dtype in storage.LARGEST_CODES else cache


def _side_by_side(given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contiguous keys and values, each [requests, kv heads, sequence, head_dim]."""
    seq_len = given.lengths[0][1]
    tables = torch.from_numpy(given.batch.block_tables.astype(np.int64)).to(given.cache.device)
    gathered = given.cache[tables].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    keys, values = gathered.chunk(2, dim=1)
    return keys.contiguous(), values.contiguous()


def _flex(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length, device = queries.shape[2], str(queries.device)
    mask = create_block_mask(_is_causal, None, None, length, length, device=device) if causal else None
    # On a CPU it is computed as written, which also checks the call.
    call: Any = torch.compile(flex_attention) if queries.is_cuda else flex_attention
    return lambda: call(queries, keys, values, block_mask=mask, enable_gqa=True)


def _by_cudnn(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=True)


def _paged_flash_attention(given: Inputs, causal: bool) -> Run:
    """Return a run over the same block tables; keys and values lie apart, each [blocks, block, heads, head_dim]."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    device = given.query.device
    keys, values = (part.transpose(1, 2).contiguous() for part in given.cache.chunk(2, dim=1))
    starts = torch.from_numpy(given.batch.query_start_loc.astype(np.int32)).to(device)
    lengths = torch.from_numpy(given.batch.seq_lens.astype(np.int32)).to(device)
    tables = torch.from_numpy(given.batch.block_tables).to(device)
    tokens, longest = (max(sizes) for sizes in zip(*given.lengths, strict=True))

    def run() -> torch.Tensor:
        found: torch.Tensor = flash_attn_varlen_func(
            given.query, keys, values, tokens, starts, longest, seqused_k=lengths, causal=causal,
            softmax_scale=given.scale, block_table=tables, fa_version=3,
        )  # fmt: skip
        return found

    return run


def _is_causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def _flash_attention(given: Inputs, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> Run:
    import flash_attn

    requests, (tokens, _) = len(given.lengths), given.lengths[0]
    query = given.query.view(requests, tokens, *given.query.shape[1:])
    key, value = keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()
    return lambda: flash_attn.flash_attn_func(query, key, value, causal=causal)


def _flashinfer(given: Inputs, tokens: int) -> Run:
    """Return a run of FlashInfer over the same block tables; its cache has keys and values apart, each [blocks, kv
    heads,
    block, head_dim].
    """
    import flashinfer

    device, shape = given.query.device, given.shape
    keys, values = (part.contiguous() for part in given.cache.chunk(2, dim=1))
    widths = np.array([-(-seq_len // BLOCK_SIZE) for _, seq_len in given.lengths])
    indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(widths))).astype(np.int32)).to(device)
    tables = [row[:width] for row, width in zip(given.batch.block_tables, widths, strict=True)]
    indices = torch.from_numpy(np.concatenate(tables)).to(device)
    last = torch.tensor([(seq_len - 1) % BLOCK_SIZE + 1 for _, seq_len in given.lengths], dtype=torch.int32)
    space = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
    if tokens == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last.to(device), *heads, q_data_type=given.query.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "HND")
        starts = torch.from_numpy(given.batch.query_start_loc.astype(np.int32)).to(device)
        wrapper.plan(starts, indptr, indices, last.to(device), *heads, causal=True, q_data_type=given.query.dtype)
    return lambda: wrapper.run(given.query, (keys, values))
