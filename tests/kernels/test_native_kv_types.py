"""The paged cache in bfloat16 and in 8 bits, and attention whose results do not depend on the batch."""

from __future__ import annotations

from typing import Any

import attention_batches
import numpy as np
import pytest
import torch
from attention_batches import Tables

from pagemill_kernels import torch_ops as native
from pagemill_kernels import torch_ops as rope
from pagemill_kernels.cpu import library
from pagemill_kernels.kv_store import reference as kv_reference
from pagemill_kernels.kv_store import storage
from pagemill_kernels.paged_attention import reference
from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_kernels.rope import reference as rope_reference

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")

NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 40, 16, 6, 2, 48
CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16, torch.int8]


def batch_of(lengths: list[tuple[int, int]], tables: Tables) -> AttentionBatch:
    """Return a batch; `lengths` has (new tokens, context before them) of each request."""
    return attention_batches.batch_of(
        attention_batches.after_context(lengths), tables, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE
    )


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    window: int | None = None,
    plan_attention: Any = native.plan_attention,
) -> torch.Tensor:
    plan = plan_attention(batch, window, torch.float32, CPU)
    return native.paged_attention(query, cache, plan, HEAD_DIM**-0.5)


def empty_cache(dtype: torch.dtype) -> torch.Tensor:
    width = storage.token_width(dtype, HEAD_DIM)
    return torch.zeros(NUM_BLOCKS, 2 * NUM_KV_HEADS, BLOCK_SIZE, width, dtype=dtype)


def store(heads: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Store keys and values without rotation."""
    no_angle = torch.ones(len(heads), 1, HEAD_DIM // 2)
    rope.rope_and_store(heads, NUM_HEADS, no_angle, torch.zeros_like(no_angle), cache, slots)


def filled_cache(dtype: torch.dtype) -> torch.Tensor:
    """Return a cache in which the kernel has written every slot."""
    cache, slots = empty_cache(dtype), torch.randperm(NUM_BLOCKS * BLOCK_SIZE)
    store(torch.randn(len(slots), NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM), cache, slots)
    return cache


@pytest.mark.parametrize("dtype", TYPES)
def test_the_stored_values_are_the_rounded_ones_of_each_token_and_head(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads = torch.randn(200, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    cos, sin = torch.rand(200, 1, HEAD_DIM // 2), torch.rand(200, 1, HEAD_DIM // 2)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:200]
    cache, expected = empty_cache(dtype), torch.zeros(NUM_BLOCKS, 2 * NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    rotated = heads.clone()
    rope_reference.apply_rope(rotated[:, : NUM_HEADS + NUM_KV_HEADS], cos, sin)
    rope.rope_and_store(heads, NUM_HEADS, cos, sin, cache, slots)
    kept = heads[:, NUM_HEADS:]
    torch.testing.assert_close(kept, rotated[:, NUM_HEADS:])
    if dtype == torch.int8:
        codes, scales = storage.encode(kept)
        kept = codes.float() * scales[..., None]
    kv_reference.store_kv(kept.to(dtype).float() if dtype == torch.bfloat16 else kept, expected, slots)
    assert torch.equal(storage.decode(cache), expected)


def test_quantized_values_are_within_half_a_step() -> None:
    x = torch.randn(50, HEAD_DIM) * torch.logspace(-6, 4, 50)[:, None]
    codes, scales = storage.encode(x)
    assert ((codes.float() * scales[:, None] - x).abs() <= 0.501 * scales[:, None]).all()
    assert torch.equal(codes.abs().amax(-1), torch.full((50,), 127, dtype=torch.int8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", TYPES)
def test_values_that_are_not_finite_remain_so_and_zeros_remain_zero(dtype: torch.dtype, value: float) -> None:
    heads = torch.zeros(2, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    heads[1, NUM_HEADS + NUM_KV_HEADS :, 5] = value
    cache = empty_cache(dtype)
    store(heads, cache, torch.tensor([0, 1]))
    decoded = storage.decode(cache)
    assert not decoded[0, :NUM_KV_HEADS].any()
    assert not decoded[0, :, 0].any()
    assert not decoded[0, NUM_KV_HEADS:, 1].isfinite().all(-1).any()


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_reads_the_values_that_the_cache_represents(dtype: torch.dtype, window: int | None) -> None:
    torch.manual_seed(1)
    cache = filled_cache(dtype)
    tables = np.stack([np.random.default_rng(i).permutation(NUM_BLOCKS)[:8] for i in range(4)]).astype(np.int32)
    batch = batch_of([(1, 99), (40, 30), (1, 0), (17, 0)], tables)
    query = torch.randn(59, NUM_HEADS, HEAD_DIM)
    plan = reference.plan_attention(batch, window, torch.float32, CPU)
    expected = reference.paged_attention(query, storage.decode(cache), plan, HEAD_DIM**-0.5)
    torch.testing.assert_close(attend(query, cache, batch, window), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
def test_bytes_beyond_a_sequence_do_not_matter(dtype: torch.dtype) -> None:
    cache, tables = filled_cache(dtype), np.array([[3]], dtype=np.int32)
    query, batch = torch.randn(1, NUM_HEADS, HEAD_DIM), batch_of([(1, 4)], tables)
    clean = attend(query, cache, batch)
    if dtype == torch.int8:
        storage.scales(cache)[:, :, 5:] = float("nan")
    else:
        cache[:, :, 5:] = float("nan")
    assert torch.equal(attend(query, cache, batch), clean)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", TYPES)
def test_batch_invariant_attention_gives_equal_bits_in_any_batch_and_chunks(
    dtype: torch.dtype, window: int | None
) -> None:
    torch.manual_seed(2)
    cache = filled_cache(dtype)
    tables = np.random.default_rng(0).permutation(NUM_BLOCKS)[:8].astype(np.int32)[None]
    query = torch.randn(100, NUM_HEADS, HEAD_DIM)

    def in_chunks(sizes: list[int]) -> torch.Tensor:
        starts = np.concatenate(([0], np.cumsum(sizes)))
        chunks = [
            attend(
                query[start : start + size],
                cache,
                batch_of([(size, int(start))], tables),
                window,
                native.plan_invariant_attention,
            )
            for start, size in zip(starts, sizes, strict=False)
        ]
        return torch.cat(chunks)

    whole = in_chunks([100])
    for sizes in ([1] * 100, [33, 33, 34], [1, 98, 1], [7] * 14 + [2]):
        assert torch.equal(in_chunks(sizes), whole)
    together = batch_of([(1, 9), (60, 30), (2, 0)], np.repeat(tables, 3, 0))
    rows = torch.cat((query[9:10], query[30:90], query[:2]))
    mixed = attend(rows, cache, together, window, native.plan_invariant_attention)
    assert torch.equal(mixed, torch.cat((whole[9:10], whole[30:90], whole[:2])))
