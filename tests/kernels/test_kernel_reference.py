"""Every CPU implementation equals its torch reference on irregular shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_batches import Lengths, batch_of

from pagemill_kernels import registry
from pagemill_kernels.cpu import library
from pagemill_kernels.kv_store import reference as kv_reference
from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_kernels.rope import cpu as rope_cpu
from pagemill_kernels.rope import reference as rope_reference

BLOCK_SIZE = 16
NUM_BLOCKS = 40
DTYPES = [torch.float32, torch.bfloat16]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    loose = {"atol": 3e-2, "rtol": 3e-2} if expected.dtype == torch.bfloat16 else {"atol": 2e-5, "rtol": 1e-4}
    torch.testing.assert_close(actual, expected, **loose)


def both(operation: str) -> tuple[object, object]:
    return registry.resolve(operation, "cpu"), registry.resolve(operation, "reference")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 129), (3, 5, 48)])
def test_rms_norm_equals_its_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cpu, reference = both("rms_norm")
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    close(cpu(x, weight, 1e-5), reference(x, weight, 1e-5))


def test_rms_norm_does_not_change_its_input() -> None:
    x = random(3, 8)
    before = x.clone()
    registry.resolve("rms_norm", "cpu")(x, torch.ones(8), 1e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 9])
def test_rope_works_on_a_slice_of_a_fused_projection(tokens: int, dtype: torch.dtype) -> None:
    fused = random(tokens, 7, 32, dtype=dtype)
    angles = random(tokens, 1, 16, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = fused.clone()
    rope_reference.apply_rope(expected[:, :5], cos, sin)
    rope_cpu.apply_rope(fused[:, :5], cos, sin)
    close(fused, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_equals_its_formula(dtype: torch.dtype) -> None:
    cpu, reference = both("silu_and_mul")
    gate_up = random(5, 2 * 33, dtype=dtype)
    expected = reference(gate_up.clone())
    close(cpu(gate_up), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 64, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_torchs(rows: int, bias: bool, dtype: torch.dtype) -> None:
    cpu, reference = both("pack_linear")
    weight, b = random(96, 72, dtype=dtype), random(96, dtype=dtype, seed=1) if bias else None
    x = random(rows, 72, dtype=dtype, seed=2)
    close(cpu(weight, b)(x), reference(weight, b)(x))


def test_store_kv_writes_only_its_slots() -> None:
    slots = torch.tensor([3, 17, 16 * 9 + 15, 32])
    key_value = random(4, 6, 8)
    expected, actual = random(NUM_BLOCKS, 6, BLOCK_SIZE, 8, seed=1), random(NUM_BLOCKS, 6, BLOCK_SIZE, 8, seed=1)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = key_value[token]
    kv_reference.store_kv(key_value, actual, slots)
    assert torch.equal(actual, expected)


def attention_batch(lengths: Lengths, num_kv_heads: int, head_dim: int) -> AttentionBatch:
    """Return a batch whose blocks are scattered over the pool and not shared."""
    order = np.random.default_rng(0).permutation(NUM_BLOCKS - 1).tolist()
    tables = np.zeros((len(lengths), max(-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths)), dtype=np.int32)
    for table, (_, seq_len) in zip(tables, lengths, strict=True):
        table[: -(-seq_len // BLOCK_SIZE)] = [order.pop() for _ in range(-(-seq_len // BLOCK_SIZE))]
    padding = NUM_BLOCKS - 1
    return batch_of(lengths, tables, num_kv_heads, head_dim, BLOCK_SIZE, padding_block=padding)


BATCHES = {
    "one decode": [(1, 1)],
    "decodes of many lengths": [(1, 5), (1, 16), (1, 17), (1, 100), (1, 33)],
    "whole prompts": [(5, 5), (33, 33)],
    "chunks in the middle": [(7, 40), (2, 18), (16, 32)],
    "mixed, decodes apart": [(1, 20), (9, 30), (1, 3), (4, 4), (1, 64)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 12, 1000])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("batch_name", BATCHES)
def test_paged_attention_equals_attention_over_contiguous_keys(
    batch_name: str, heads: tuple[int, int], window: int | None, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads = heads
    batch = attention_batch(BATCHES[batch_name], num_kv_heads, 24)
    cache = random(NUM_BLOCKS, 2 * num_kv_heads, BLOCK_SIZE, 24, dtype=dtype)
    query = random(int(batch.query_start_loc[-1]), num_heads, 24, dtype=dtype, seed=1)
    results = []
    for device in ("cpu", "reference"):
        plan = registry.resolve("plan_attention", device)(batch, window, dtype, torch.device("cpu"))
        results.append(registry.resolve("paged_attention", device)(query, cache, plan, 0.2))
    close(*results)


@pytest.mark.parametrize("window", [None, 30])
def test_hidden_keys_take_no_part(window: int | None) -> None:
    batch = replace(attention_batch([(1, 40), (7, 20), (30, 30)], 2, 24), first_key=1)
    cache, query = random(NUM_BLOCKS, 4, BLOCK_SIZE, 24), random(38, 4, 24, seed=1)
    results = []
    for device in ("cpu", "reference"):
        plan = registry.resolve("plan_attention", device)(batch, window, torch.float32, torch.device("cpu"))
        found = registry.resolve("paged_attention", device)(query, cache, plan, 0.2)
        results.append(torch.cat([found[:8], found[9:]]))  # the first token of the last request sees nothing
    close(*results)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("batch_name", BATCHES)
def test_with_values_in_keys_attention_equals_that_over_separate_ones(
    batch_name: str, backend: registry.Backend
) -> None:
    batch = attention_batch(BATCHES[batch_name], 1, 24)
    cache = random(NUM_BLOCKS, 1, BLOCK_SIZE, 24)
    query = random(int(batch.query_start_loc[-1]), 6, 24, seed=1)
    results = []
    for held in (cache, cache.repeat(1, 2, 1, 1)):
        plan = registry.resolve("plan_attention", backend)(batch, None, torch.float32, torch.device("cpu"))
        results.append(registry.resolve("paged_attention", backend)(query, held, plan, 0.2))
    close(*results)


def test_decodes_of_very_different_lengths_are_split_into_groups() -> None:
    batch = attention_batch([(1, 300), (1, 3), (1, 5), (1, 2)], 1, 8)
    batch.seq_lens[0] = 16 * 100
    wide = np.zeros((4, 100), dtype=np.int32)
    plan = registry.resolve("plan_attention", "cpu")(
        AttentionBatch(batch.query_start_loc, batch.seq_lens, wide, BLOCK_SIZE, NUM_BLOCKS - 1),
        None,
        torch.float32,
        torch.device("cpu"),
    )
    assert [group.num_requests for group in plan.decodes] == [3, 1]


def test_memory_beyond_a_sequence_is_never_read() -> None:
    batch = attention_batch([(1, 20), (1, 60), (3, 19)], 2, 8)
    cache = random(NUM_BLOCKS, 4, BLOCK_SIZE, 8)
    query = random(5, 2, 8, seed=1)
    plan = registry.resolve("plan_attention", "cpu")(batch, None, torch.float32, torch.device("cpu"))
    attention = registry.resolve("paged_attention", "cpu")
    before = attention(query, cache, plan, 1.0)
    used = set()
    for table, seq_len in zip(batch.block_tables, batch.seq_lens, strict=True):
        used.update(table[: -(-int(seq_len) // BLOCK_SIZE)].tolist())
        cache[table[(int(seq_len) - 1) // BLOCK_SIZE], :, int(seq_len) % BLOCK_SIZE or BLOCK_SIZE :] = 1e4
    unused = [block for block in range(NUM_BLOCKS - 1) if block not in used]
    cache[unused] = float("nan")
    assert torch.equal(attention(query, cache, plan, 1.0), before)


@pytest.mark.parametrize("backend", ["reference", "cpu", "cpu_native", "cpu_onednn"])
def test_rope_and_store_equals_both_steps(backend: registry.Backend) -> None:
    num_heads, num_kv_heads, head_dim = 4, 2, 16
    heads, slots = random(3, num_heads + 2 * num_kv_heads, head_dim), torch.tensor([5, 37, 16])
    angles = random(3, 1, head_dim // 2, seed=1)
    cache = torch.zeros(NUM_BLOCKS, 2 * num_kv_heads, BLOCK_SIZE, head_dim)
    expected = heads.clone()
    rope_reference.apply_rope(expected[:, : num_heads + num_kv_heads], angles.cos(), angles.sin())
    ops = registry.ops_for(backend)
    ops.rope_and_store(heads, num_heads, angles.cos(), angles.sin(), cache, slots)
    close(heads, expected)
    for token, slot in enumerate(slots.tolist()):
        close(cache[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE], expected[token, num_heads:])
    assert int((cache != 0).any(-1).sum()) == 3 * 2 * num_kv_heads


def test_a_backend_without_an_implementation_uses_the_reference() -> None:
    assert registry.resolve("store", "cpu") is registry.resolve("store", "reference")


def test_native_backends_are_selected_only_for_supported_types_and_shapes() -> None:
    native = library.load() is not None
    assert registry.cpu_backend("float32", 64, 16, 3)[0] == ("cpu_native" if native else "cpu")
    assert (registry.cpu_backend("bfloat16", 64, 16, 3)[0] in registry.NATIVE_BACKENDS) == native
    assert registry.cpu_backend("float16", 64, 16, 3)[0] == "cpu"
    backend, how = registry.cpu_backend("float32", 584, 16, 3)
    assert backend == "cpu"
    assert not native or "584" in how
