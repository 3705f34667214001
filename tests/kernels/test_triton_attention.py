"""Triton's paged attention equals the reference, on a device or in the interpreter."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import attention_batches
import numpy as np
import pytest
import torch
from attention_batches import Lengths, ShapedBatch
from triton.runtime.interpreter import interpreter_builder
from triton_device import CODE_TYPES, DEVICE, HAS_GPU, NARROW_TYPES, close, random, sparse

from pagemill_kernels.gpu import launch
from pagemill_kernels.kv_store import storage
from pagemill_kernels.paged_attention import reference, tiles, triton_launch

NUM_BLOCKS = 40
BATCHES = {
    "one token": [(1, 1)],
    "decodes of many lengths": [(1, 5), (1, 16), (1, 17), (1, 100)],
    "whole prompts": [(5, 5), (33, 33)],
    "chunks in the middle": [(7, 40), (2, 18), (16, 32)],
    "mixed": [(1, 20), (9, 30), (1, 3), (4, 4), (1, 64)],
    "requests without tokens": [(0, 0), (1, 20), (0, 12), (9, 9), (0, 1)],
}
"""(tokens of this step, sequence length) of each request."""


def batch_of(
    lengths: Lengths, num_kv_heads: int, head_dim: int, block_size: int = 16, num_blocks: int = NUM_BLOCKS
) -> ShapedBatch:
    """Return a batch with scattered tables, whose requests share blocks."""
    tables = attention_batches.scattered_tables(lengths, num_blocks, block_size)
    return attention_batches.batch_of(lengths, tables, num_kv_heads, head_dim, block_size)


def assert_equals_reference(
    batch: ShapedBatch,
    num_heads: int,
    *,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    soft_cap: float | None = None,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    cache = random(NUM_BLOCKS, 2 * batch.num_kv_heads, batch.block_size, batch.head_dim, dtype=dtype)
    num_tokens = int(batch.query_start_loc[-1])
    # The query is a slice of a fused projection, as in a model.
    query = random(num_tokens, num_heads + 2, batch.head_dim, dtype=dtype, seed=1)[:, :num_heads]
    extras = (soft_cap, slopes, sinks)
    results = [
        module.paged_attention(query, cache, module.plan_attention(batch, window, dtype, DEVICE), 0.2, *extras)
        for module in (triton_launch, reference)
    ]
    close(*results)


@pytest.mark.parametrize(("heads", "window"), [((4, 4), None), ((6, 2), 12), ((9, 1), None)])
@pytest.mark.parametrize("batch_name", BATCHES)
def test_attention_equals_the_reference(batch_name: str, heads: tuple[int, int], window: int | None) -> None:
    num_heads, num_kv_heads = heads
    assert_equals_reference(batch_of(BATCHES[batch_name], num_kv_heads, 16), num_heads, window=window)


@pytest.mark.parametrize("dtype", NARROW_TYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 160, 192, 256, 512])
def test_all_head_sizes_and_16_bit_types_are_supported(head_dim: int, dtype: torch.dtype) -> None:
    assert_equals_reference(batch_of([(1, 20), (9, 30)], 1, head_dim), 3, dtype=dtype)


@pytest.mark.parametrize("lengths", [[(1, 20), (1, 70)], [(1, 20), (40, 50)]], ids=["decodes", "mixed"])
@pytest.mark.parametrize("heads", [(4, 2), (40, 1)], ids=["group of 2", "group of 40"])
def test_wide_heads_in_float32_are_supported(heads: tuple[int, int], lengths: list[tuple[int, int]]) -> None:
    """Their tiles are smaller, so that they fit every device."""
    assert_equals_reference(batch_of(lengths, heads[1], 192), heads[0])


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("query_dtype", [torch.float32, *NARROW_TYPES])
def test_the_cache_may_have_another_float_type_than_the_queries(cached: torch.dtype, query_dtype: torch.dtype) -> None:
    batch = batch_of(BATCHES["mixed"], 2, 64)
    cache = random(NUM_BLOCKS, 4, 16, 64, dtype=cached)
    query = random(int(batch.query_start_loc[-1]), 4, 64, dtype=query_dtype, seed=1)
    plan = triton_launch.plan_attention(batch, None, query_dtype, DEVICE)
    expected = reference.paged_attention(query, cache, reference.plan_attention(batch, None, query_dtype, DEVICE), 0.2)
    close(triton_launch.paged_attention(query, cache, plan, 0.2), expected)


@pytest.mark.parametrize("block_size", [32, 48])
def test_blocks_may_have_any_multiple_of_16_tokens(block_size: int) -> None:
    assert_equals_reference(batch_of(BATCHES["mixed"], 2, 32, block_size), 4)


@pytest.mark.parametrize(
    ("soft_cap", "has_slopes", "window"), [(3.0, False, None), (None, True, None), (3.0, True, 20)]
)
def test_soft_cap_and_alibi_equal_the_reference(soft_cap: float | None, has_slopes: bool, window: int | None) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE) if has_slopes else None
    batch = batch_of([(1, 20), (9, 30)], 2, 32)
    assert_equals_reference(batch, 4, soft_cap=soft_cap, slopes=slopes, window=window)


def test_a_first_key_is_seen_by_its_own_token_alone() -> None:
    """A head that drafts has nothing at the first place of a context; a prompt's first token sees itself there."""
    batch = dataclasses.replace(batch_of([(1, 40), (30, 30)], 2, 32), first_key=1)
    cache, query = random(NUM_BLOCKS, 4, 16, 32), random(31, 4, 32, seed=1)
    found, expected = (
        module.paged_attention(query, cache, module.plan_attention(batch, None, torch.float32, DEVICE), 0.2)
        for module in (triton_launch, reference)
    )
    own = torch.arange(31, device=DEVICE) != 1
    close(found[own], expected[own])
    first_value = cache[int(batch.block_tables[1, 0]), 2:, 0]
    close(found[1], first_value.repeat_interleave(2, 0))


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("batch_name", ["mixed", "requests without tokens"])
def test_sinks_equal_the_reference(batch_name: str, window: int | None) -> None:
    sinks = torch.tensor([4.0, -3.0, 0.5, 20.0], device=DEVICE)
    assert_equals_reference(batch_of(BATCHES[batch_name], 2, 32), 4, sinks=sinks, window=window)


LONG_DECODES = [(1, 540), (1, 1), (1, 257)]


@pytest.mark.parametrize(("num_splits", "window"), [(4, None), (4, 300), (16, None)])
def test_the_parts_of_a_split_context_are_combined(
    num_splits: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some requests are long enough for several parts and others are not; each program determines it by itself."""
    monkeypatch.setattr(triton_launch, "choose_splits", lambda num_programs: num_splits)
    assert_equals_reference(batch_of(LONG_DECODES, 1, 16), 2, window=window)
    sinks = torch.tensor([1.5, -2.0], device=DEVICE)
    assert_equals_reference(batch_of(LONG_DECODES, 1, 16), 2, window=window, sinks=sinks)


def test_few_programs_are_split_and_many_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "num_multiprocessors", lambda: 100)
    assert tiles.choose_splits(1) == tiles.SPLITS[-1]
    assert tiles.choose_splits(100_000) == 1


def cache_of_codes(dtype: torch.dtype, num_kv_heads: int, head_dim: int, block_size: int = 16) -> torch.Tensor:
    shape = (NUM_BLOCKS, 2 * num_kv_heads, block_size)
    cache = torch.zeros(*shape, storage.token_width(dtype, head_dim), dtype=dtype)
    storage.write_blocks(cache, random(*shape, head_dim).cpu())
    return cache


@pytest.mark.parametrize(
    ("lengths", "head_dim", "block_size", "soft_cap", "window"),
    [
        (BATCHES["mixed"], 32, 16, None, None),
        (BATCHES["decodes of many lengths"], 80, 48, None, None),
        (BATCHES["mixed"], 64, 16, 3.0, 12),
        (BATCHES["requests without tokens"], 256, 32, None, None),
    ],
    ids=["mixed", "decodes", "soft cap and window", "wide heads"],
)
@pytest.mark.parametrize("query_dtype", [torch.float32, *NARROW_TYPES])
@pytest.mark.parametrize("dtype", CODE_TYPES)
def test_a_quantized_cache_is_read(
    dtype: torch.dtype,
    query_dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    head_dim: int,
    block_size: int,
    soft_cap: float | None,
    window: int | None,
) -> None:
    batch = batch_of(lengths, 2, head_dim, block_size)
    cache = cache_of_codes(dtype, 2, head_dim, block_size)
    query = random(int(batch.query_start_loc[-1]), 4, head_dim, dtype=query_dtype, seed=1)
    plan = triton_launch.plan_attention(batch, window, query_dtype, DEVICE)
    expected_plan = reference.plan_attention(batch, window, query_dtype, DEVICE)
    expected = reference.paged_attention(query, storage.decode(cache).to(DEVICE), expected_plan, 0.2, soft_cap)
    close(triton_launch.paged_attention(query, cache.to(DEVICE), plan, 0.2, soft_cap), expected)


@pytest.mark.parametrize("dtype", [torch.float32, *CODE_TYPES])
def test_blocks_may_lie_any_stride_apart(dtype: torch.dtype) -> None:
    """As those of one layer do in an arena of several."""
    batch = batch_of(BATCHES["mixed"], 2, 32)
    cache = (cache_of_codes(dtype, 2, 32) if dtype in storage.LARGEST_CODES else random(NUM_BLOCKS, 4, 16, 32)).to(
        DEVICE
    )
    memory = torch.full((NUM_BLOCKS, cache[0].numel() + 48), 99.0, device=DEVICE).to(dtype)
    apart = memory[:, 16:-32].view(cache.shape)
    apart.copy_(cache)
    query = random(int(batch.query_start_loc[-1]), 4, 32, seed=1)
    plan = triton_launch.plan_attention(batch, None, torch.float32, DEVICE)
    together, found = (triton_launch.paged_attention(query, each, plan, 0.2) for each in (cache, apart))
    assert torch.equal(found, together)


@pytest.mark.parametrize("dtype", CODE_TYPES)
def test_a_long_context_of_a_quantized_cache_is_split_too(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "choose_splits", lambda num_programs: 4)
    batch, cache = batch_of(LONG_DECODES, 1, 16), cache_of_codes(dtype, 1, 16)
    query = random(3, 2, 16, seed=1)
    plan = triton_launch.plan_attention(batch, None, torch.float32, DEVICE)
    expected_plan = reference.plan_attention(batch, None, torch.float32, DEVICE)
    expected = reference.paged_attention(query, storage.decode(cache).to(DEVICE), expected_plan, 0.2)
    close(triton_launch.paged_attention(query, cache.to(DEVICE), plan, 0.2), expected)


@pytest.mark.skipif(HAS_GPU, reason="the memory is virtual; the device has a test of its own")
@pytest.mark.parametrize("dtype", CODE_TYPES)
def test_blocks_beyond_the_2_31st_element_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    """Quantized values and, a quarter as many, their scales."""
    width = storage.token_width(dtype, 64)
    num_blocks = 2**31 // (32 * 16 * width) + NUM_BLOCKS
    far = sparse(tmp_path / "cache", num_blocks * 32 * 16 * width, dtype).view(num_blocks, 32, 16, width)
    near = cache_of_codes(dtype, 16, 64)
    far[-NUM_BLOCKS:] = near
    batch = batch_of([(1, 20), (2, 40)], 16, 64)
    query = random(3, 16, 64, seed=1)
    plan = triton_launch.plan_attention(batch, None, torch.float32, DEVICE)
    expected = triton_launch.paged_attention(query, near, plan, 0.2)
    batch.block_tables[:] += num_blocks - NUM_BLOCKS
    far_plan = triton_launch.plan_attention(batch, None, torch.float32, DEVICE)
    assert torch.equal(triton_launch.paged_attention(query, far, far_plan, 0.2), expected)


@pytest.mark.parametrize("window", [None, 10])
def test_memory_beyond_a_sequence_or_before_its_window_is_never_read(window: int | None) -> None:
    batch = batch_of([(1, 36), (3, 51)], 1, 16)
    batch.block_tables[:] = np.arange(batch.block_tables.size).reshape(batch.block_tables.shape)
    cache = random(NUM_BLOCKS, 2, 16, 16)
    query = random(4, 2, 16, seed=1)
    plan = triton_launch.plan_attention(batch, window, torch.float32, DEVICE)
    before = triton_launch.paged_attention(query, cache, plan, 1.0)
    cache[batch.block_tables.max() + 1 :] = float("nan")
    for table, seq_len in zip(batch.block_tables, batch.seq_lens.tolist(), strict=True):
        cache[table[seq_len // 16], :, seq_len % 16 :] = float("nan")
        if window is not None:
            cache[table[0]] = float("nan")
    assert torch.equal(triton_launch.paged_attention(query, cache, plan, 1.0), before)


@pytest.mark.skipif(HAS_GPU, reason="matmuls of the interpreter are counted")
@pytest.mark.parametrize(
    ("lengths", "heads", "window", "num_tiles"),
    [
        ([(64, 64)], (1, 1), None, 1 + 2 + 3 + 4),
        ([(32, 128)], (1, 1), None, 7 + 8),
        ([(64, 64)], (1, 1), 8, 1 + 2 + 2 + 2),
        ([(1, 64), (1, 17)], (4, 1), None, 4 + 2),
        ([(1, 64)], (4, 2), None, 2 * 4),
        ([(4, 32)], (4, 1), None, 2),
    ],
    ids=["causal", "behind a context", "window", "group of 4", "two groups of 2", "tokens and heads in one block"],
)
def test_only_tiles_that_some_row_needs_are_read_once_for_a_whole_group(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    window: int | None,
    num_tiles: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks have 16 rows and tiles 16 keys; each tile is two matmuls."""
    products: list[int] = []
    builder = type(interpreter_builder)
    multiply = builder.create_dot

    def counted(*arguments: Any) -> Any:
        products.append(1)
        return multiply(*arguments)

    monkeypatch.setattr(builder, "create_dot", counted)
    monkeypatch.setattr(triton_launch, "choose_tiles", lambda *shape: tiles.AttentionTiles(16, 16, 4, 2))
    num_heads, num_kv_heads = heads
    assert_equals_reference(batch_of(lengths, num_kv_heads, 16), num_heads, window=window)
    assert len(products) == 2 * num_tiles


def test_a_request_may_have_a_hundred_thousand_tokens() -> None:
    """A window keeps the work small; positions, blocks and offsets are those of the long request."""
    assert_equals_reference(batch_of([(3, 100_000), (1, 99_999)], 1, 16), 2, window=40)


@pytest.mark.skipif(not HAS_GPU, reason="a CUDA graph requires a device")
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_captured_mixed_batch_reads_the_current_data(num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two launches are on two streams, and the graph contains both."""
    monkeypatch.setattr(triton_launch, "choose_splits", lambda num_programs: num_splits)
    batch = batch_of([*BATCHES["mixed"], (1, 540)], 2, 32)
    cache, query = random(NUM_BLOCKS, 4, 16, 32), random(int(batch.query_start_loc[-1]), 4, 32, seed=1)
    plan = triton_launch.plan_attention(batch, None, torch.float32, DEVICE)
    triton_launch.paged_attention(query, cache, plan, 0.2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_launch.paged_attention(query, cache, plan, 0.2)
    for seed in (2, 3):
        query.copy_(random(*query.shape, seed=seed))
        graph.replay()
        # This is queued after the replay, so it reads what the replay wrote.
        expected = reference.paged_attention(
            query, cache, reference.plan_attention(batch, None, torch.float32, DEVICE), 0.2
        )
        close(out, expected)


def test_without_tokens_nothing_is_launched() -> None:
    batch = batch_of([(0, 5)], 1, 16)
    plan = triton_launch.plan_attention(batch, None, torch.float32, DEVICE)
    query, cache = random(0, 2, 16), random(NUM_BLOCKS, 2, 16, 16)
    assert triton_launch.paged_attention(query, cache, plan, 1.0).shape == (0, 2, 16)


def test_large_scores_do_not_overflow() -> None:
    batch = batch_of([(3, 40)], 1, 64)
    cache, query = random(NUM_BLOCKS, 2, 16, 64) * 40, random(3, 2, 64, seed=1) * 40
    results = [
        module.paged_attention(query, cache, module.plan_attention(batch, None, torch.float32, DEVICE), 1.0)
        for module in (triton_launch, reference)
    ]
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


def test_unsupported_shapes_are_named() -> None:
    assert triton_launch.supports(128, 16, 8) is None
    assert "24" in str(triton_launch.supports(24, 16, 1))
    assert triton_launch.supports(512, 16, 8) is None
    assert "528" in str(triton_launch.supports(528, 16, 1))
    assert "40 tokens" in str(triton_launch.supports(64, 40, 1))
    batch = batch_of([(1, 5)], 1, 16)
    plan = triton_launch.plan_attention(batch, None, torch.float32, DEVICE)
    with pytest.raises(ValueError, match="cache is"):
        triton_launch.paged_attention(random(1, 2, 16), random(4, 2, 16, 32), plan, 1.0)
    with pytest.raises(ValueError, match="2 tokens"):
        triton_launch.paged_attention(random(2, 2, 16), random(4, 2, 16, 16), plan, 1.0)
    query, cache = random(1, 2, 16), random(4, 2, 16, 16)
    with pytest.raises(ValueError, match="int32"):
        triton_launch.paged_attention(query.int(), cache, plan, 1.0)
    with pytest.raises(ValueError, match="cache has strides"):
        triton_launch.paged_attention(query, random(4, 2, 16, 32)[..., :16], plan, 1.0)
    with pytest.raises(ValueError, match=r"alibi_slopes is \[3\], \[2\] is needed"):
        triton_launch.paged_attention(query, cache, plan, 1.0, alibi_slopes=random(3))
    with pytest.raises(ValueError, match="alibi_slopes has strides"):
        triton_launch.paged_attention(query, cache, plan, 1.0, alibi_slopes=random(2, 2)[:, 0])
    with pytest.raises(ValueError, match="one device is needed"):
        triton_launch.paged_attention(query, torch.zeros(4, 2, 16, 20, dtype=torch.int8, device="meta"), plan, 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_lens": torch.ones(2, dtype=torch.int64)}, r"seq_lens is torch\.int64; torch\.int32 is needed"),
        ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, r"query_start_loc is \[2\], \[3\] is needed"),
        ({"block_tables": torch.zeros(1, 4, dtype=torch.int32)}, "1 block tables for 2 requests"),
        ({"block_tables": torch.zeros(4, 2, dtype=torch.int32).t()}, "block_tables has strides"),
        ({"block_tables": torch.zeros(2, 4, dtype=torch.int32, device="meta")}, "lies on"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_by_name(changes: dict[str, torch.Tensor], words: str) -> None:
    plan = triton_launch.plan_attention(batch_of([(1, 5), (1, 9)], 1, 16), None, torch.float32, DEVICE)
    placed = {name: each if each.device.type == "meta" else each.to(DEVICE) for name, each in changes.items()}
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(plan, **placed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_batches_of_realistic_size_equal_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    lengths = [(1, 1 + 37 * i) for i in range(64)] + [(700, 700), (64, 2000)]
    assert_equals_reference(batch_of(lengths, 8, head_dim), 32, dtype=dtype)


@pytest.mark.gpu
def test_offsets_may_exceed_32_bits() -> None:
    """The test uses the last blocks of a cache of 2^31 elements and more."""
    num_blocks, shape = 70_000, (16, 16, 128)
    cache = torch.zeros(num_blocks, *shape, dtype=torch.bfloat16, device=DEVICE)
    assert cache.numel() > 2**31
    batch = batch_of([(1, 64)], 8, 128)
    batch.block_tables[:] = num_blocks - 1 - np.arange(4)
    cache[-4:] = random(4, *shape, dtype=torch.bfloat16)
    query = random(1, 32, 128, dtype=torch.bfloat16, seed=1)
    results = [
        module.paged_attention(query, cache, module.plan_attention(batch, None, torch.bfloat16, DEVICE), 0.1)
        for module in (triton_launch, reference)
    ]
    close(*results)
