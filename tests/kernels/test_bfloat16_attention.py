"""Attention with bfloat16 matmuls: as close to float32 as rounded queries and weights can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import attention_batches
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import num_examples
from pagemill_kernels import torch_ops as native
from pagemill_kernels.cpu import library
from pagemill_kernels.kv_store import storage
from pagemill_kernels.paged_attention import reference
from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_kernels.registry import ops_for

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
needs_bfloat16 = pytest.mark.skipif(not library.has_bfloat16(), reason="no bfloat16 matmul on this processor")

NUM_BLOCKS, CPU = 40, torch.device("cpu")
ROUNDING = 2**-8
"""The largest relative error of a number rounded to bfloat16, which keeps eight binary digits."""


def batch_of(
    lengths: list[tuple[int, int]], num_kv_heads: int, head_dim: int, block_size: int = 16, one_table: bool = False
) -> AttentionBatch:
    """Return a batch; `lengths` has (new tokens, context before them) of each request, in blocks of any order."""
    whole = attention_batches.after_context(lengths)
    seeds = [0] * len(lengths) if one_table else None
    tables = attention_batches.scattered_tables(whole, NUM_BLOCKS, block_size, seeds)
    return attention_batches.batch_of(whole, tables, num_kv_heads, head_dim, block_size)


def attend(
    query: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    window: int | None = None,
    plan_attention: Any = native.plan_bfloat16_attention,
    scale: float = 0.125,
) -> Tensor:
    return native.paged_attention(query, cache, plan_attention(batch, window, torch.bfloat16, CPU), scale)


def exact(query: Tensor, cache: Tensor, batch: AttentionBatch, window: int | None, scale: float = 0.125) -> Tensor:
    plan = reference.plan_attention(batch, window, torch.float32, CPU)
    return reference.paged_attention(query, cache, plan, scale)


def magnitudes_of_values(cache: Tensor, num_kv_heads: int) -> Tensor:
    return torch.cat((cache[:, :num_kv_heads], cache[:, num_kv_heads:].abs()), 1)


def cache_of(num_kv_heads: int, head_dim: int, block_size: int = 16) -> Tensor:
    return torch.randn(NUM_BLOCKS, 2 * num_kv_heads, block_size, head_dim).bfloat16()


def stored(cache: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != torch.int8:
        return cache.to(dtype)
    codes = torch.zeros(*cache.shape[:-1], storage.token_width(dtype, cache.shape[-1]), dtype=dtype)
    storage.write_blocks(codes, cache.float())
    return codes


@needs_bfloat16
@pytest.mark.parametrize("first_key", [1, 21])
def test_hidden_keys_take_no_part(first_key: int) -> None:
    torch.manual_seed(0)
    batch = replace(batch_of([(1, 75), (40, 71)], 3, 64), first_key=first_key)
    cache, query = cache_of(3, 64), torch.randn(41, 9, 64)
    expected = exact(query, cache.float(), batch, None)
    torch.testing.assert_close(attend(query, cache, batch), expected, rtol=0.05, atol=0.05)


@needs_bfloat16
@settings(max_examples=num_examples(60), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 90)), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (9, 3), (8, 2), (4, 4), (32, 1)]),
    head_dim=st.sampled_from([16, 64, 96, 128, 256, 512]),
    block_size=st.sampled_from([16, 32]),
    window=st.sampled_from([None, 1, 7, 16, 40, 1000]),
    seed=st.integers(0, 2**31),
)
def test_with_rounded_queries_only_the_weights_add_an_error(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    seed: int,
) -> None:
    """A weight has at most one rounding error, so the result is off by at most that share of the magnitudes."""
    torch.manual_seed(seed)
    num_heads, num_kv_heads = heads
    batch = batch_of(lengths, num_kv_heads, head_dim, block_size)
    cache, scale = cache_of(num_kv_heads, head_dim, block_size), head_dim**-0.5
    tokens = int(batch.query_start_loc[-1])
    query = torch.randn(tokens, num_heads + 1, head_dim)[:, :num_heads].bfloat16().float()
    spread = exact(query, magnitudes_of_values(cache.float(), num_kv_heads), batch, window, scale)
    error = (attend(query, cache, batch, window, scale=scale) - exact(query, cache.float(), batch, window, scale)).abs()
    assert (error <= ROUNDING * spread + 1e-5).all()


@needs_bfloat16
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_the_error_against_float32_is_that_of_rounding_to_bfloat16(dtype: torch.dtype, window: int | None) -> None:
    """A rounded query, and a dequantized key, changes a score by at most a rounding of |query| times |key|.

    Weights change by at most twice as much. On average the errors cancel: less than half a rounding of the values'
    magnitudes remains.
    """
    torch.manual_seed(0)
    num_kv_heads, head_dim = 3, 64
    batch, query = batch_of([(300, 200), (40, 0)], num_kv_heads, head_dim), torch.randn(340, 9, head_dim)
    plain = cache_of(num_kv_heads, head_dim)
    cache = stored(plain, dtype)
    kept = storage.decode(cache)
    error = (attend(query, cache, batch, window) - exact(query, kept, batch, window)).abs()
    spread = exact(query, magnitudes_of_values(kept, num_kv_heads), batch, window)
    assert error.square().mean().sqrt() < ROUNDING / 2 * spread.square().mean().sqrt()
    keys, values = kept[:, :num_kv_heads], kept[:, num_kv_heads:]
    moved = 2 * ROUNDING * 0.125 * query.norm(dim=-1).max() * keys.norm(dim=-1).max()
    assert error.max() < (torch.exp(2 * moved) * (1 + 2 * ROUNDING) - 1) * values.abs().max()


@needs_bfloat16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("group", "head_dim", "window"),
    [(6, 48, None), (3, 64, None), (1, 128, 37), (4, 80, None), (8, 16, 7), (12, 64, 100)],
)
def test_a_row_has_the_same_bits_in_any_tile(group: int, head_dim: int, window: int | None, dtype: torch.dtype) -> None:
    """Also alone, as in a decode, for which lanes are keys and columns in place of rows."""
    torch.manual_seed(1)
    cache, query = stored(cache_of(2, head_dim), dtype), torch.randn(100, 2 * group, head_dim)

    def in_chunks(sizes: list[int]) -> Tensor:
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        batches = [batch_of([(size, start)], 2, head_dim) for size, start in zip(sizes, starts, strict=True)]
        parts = torch.split(query, sizes)
        return torch.cat([attend(part, cache, batch, window) for part, batch in zip(parts, batches, strict=True)])

    whole = in_chunks([100])
    for sizes in ([33, 33, 34], [3, 94, 3], [10] * 10, [1] * 100, [2] * 50, [89, 1, 8, 2]):
        assert torch.equal(in_chunks(sizes), whole)
    together = batch_of([(10, 9), (60, 30)], 2, head_dim, one_table=True)
    rows = torch.cat((query[9:19], query[30:90]))
    assert torch.equal(attend(rows, cache, together, window), torch.cat((whole[9:19], whole[30:90])))


def test_a_float32_cache_is_read_in_float32() -> None:
    torch.manual_seed(2)
    cache, batch = cache_of(2, 64).float(), batch_of([(40, 30), (1, 9)], 2, 64)
    query = torch.randn(41, 6, 64)
    assert torch.equal(attend(query, cache, batch), attend(query, cache, batch, plan_attention=native.plan_attention))


@needs_bfloat16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_bytes_beyond_a_sequence_do_not_matter(dtype: torch.dtype) -> None:
    cache, batch = stored(cache_of(1, 32), dtype), batch_of([(20, 5)], 1, 32)
    query = torch.randn(20, 3, 32)
    clean = attend(query, cache, batch)
    last = int(batch.block_tables[0, 1])
    if dtype == torch.int8:
        storage.scales(cache)[last, :, 25 - 16 :] = float("nan")
    else:
        cache[last, :, 25 - 16 :] = float("nan")
    assert torch.equal(attend(query, cache, batch), clean)


@needs_bfloat16
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("half", ["keys", "values"])
def test_values_that_are_not_finite_remain_so(value: float, half: str) -> None:
    cache, batch = cache_of(1, 32), batch_of([(20, 0)], 1, 32)
    cache[int(batch.block_tables[0, 0]), 0 if half == "keys" else 1, 3] = value
    found = attend(torch.rand(20, 3, 32), cache, batch)
    assert not found[3:].isfinite().all(-1).any()


@needs_bfloat16
def test_large_scores_do_not_overflow() -> None:
    torch.manual_seed(3)
    batch, cache = batch_of([(30, 40)], 1, 64), cache_of(1, 64) * 40
    query = torch.randn(30, 2, 64).bfloat16().float() * 32
    expected = exact(query, cache.float(), batch, None, 1.0)
    assert (attend(query, cache, batch, scale=1.0) - expected).abs().max() <= 2 * ROUNDING * cache.abs().max()


def test_bfloat16_attention_is_selected_only_with_bfloat16_arithmetic() -> None:
    assert ops_for("cpu_bfloat16").plan_attention is native.plan_bfloat16_attention
    assert ops_for("cpu_native").plan_attention is native.plan_attention
    assert ops_for("cpu_native", True).plan_attention is native.plan_invariant_attention


@needs_bfloat16
@pytest.mark.parametrize("tokens", [1, 40])
def test_sinks_take_their_share_of_the_weights(tokens: int) -> None:
    batch, cache = batch_of([(tokens, 30)], 2, 64), cache_of(2, 64)
    query, sinks = torch.randn(tokens, 8, 64), torch.linspace(-2.0, 6.0, 8)
    plan = native.plan_bfloat16_attention(batch, None, torch.bfloat16, CPU)
    found = native.paged_attention(query, cache, plan, 0.125, sinks=sinks)
    exact_plan = reference.plan_attention(batch, None, torch.float32, CPU)
    expected = reference.paged_attention(query, cache, exact_plan, 0.125, sinks=sinks)
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0.02)
    without = reference.paged_attention(query, cache, exact_plan, 0.125)
    assert (found - without).abs().max() > 0.1
