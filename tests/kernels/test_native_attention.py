"""Native paged attention and the kernels around it equal the references on fragmented and shared block tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_batches import after_context, batch_of, scattered_tables
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_kernels import torch_ops as activation
from pagemill_kernels import torch_ops as native
from pagemill_kernels import torch_ops as norm
from pagemill_kernels import torch_ops as rope
from pagemill_kernels.activation import reference as activation_reference
from pagemill_kernels.cpu import library
from pagemill_kernels.kv_store import reference as kv_store
from pagemill_kernels.kv_store import storage
from pagemill_kernels.norm import reference as norm_reference
from pagemill_kernels.paged_attention import reference
from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_kernels.paged_attention.native import supports
from pagemill_kernels.rope import reference as rope_reference

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")

NUM_BLOCKS = 40


def random_batch(lengths: list[tuple[int, int]], num_kv_heads: int, head_dim: int, block_size: int) -> AttentionBatch:
    """Return a batch with random tables that may share blocks; `lengths` has (new tokens, context) of each request."""
    whole = after_context(lengths)
    seeds = np.random.randint(2**31, size=len(whole)).tolist()
    return batch_of(whole, scattered_tables(whole, NUM_BLOCKS, block_size, seeds), num_kv_heads, head_dim, block_size)


def random_cache(dtype: torch.dtype, num_kv_heads: int, block_size: int, head_dim: int) -> torch.Tensor:
    values = torch.randn(NUM_BLOCKS, 2 * num_kv_heads, block_size, head_dim)
    if dtype != torch.int8:
        return values.to(dtype)
    cache = torch.zeros(NUM_BLOCKS, 2 * num_kv_heads, block_size, storage.token_width(dtype, head_dim), dtype=dtype)
    storage.write_blocks(cache, values)
    return cache


@settings(max_examples=num_examples(60), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 90)), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (9, 3), (8, 2), (4, 4), (32, 1)]),
    head_dim=st.sampled_from([16, 20, 33, 64, 72, 96, 128]),
    block_size=st.sampled_from([16, 32]),
    window=st.sampled_from([None, 1, 7, 16, 40, 1000]),
    has_sinks=st.booleans(),
    soft_cap=st.sampled_from([None, 0.5, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    is_invariant=st.booleans(),
    has_slopes=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_attention_equals_the_reference(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    has_sinks: bool,
    soft_cap: float | None,
    dtype: torch.dtype,
    is_invariant: bool,
    has_slopes: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    num_heads, num_kv_heads = heads
    batch = random_batch(lengths, num_kv_heads, head_dim, block_size)
    cache = random_cache(dtype, num_kv_heads, block_size, head_dim)
    query = torch.randn(int(batch.query_start_loc[-1]), num_heads + 1, head_dim)[:, :num_heads]
    device = torch.device("cpu")
    extras = {
        "sinks": torch.randn(num_heads) * 4 if has_sinks else None,
        "alibi_slopes": torch.rand(num_heads) if has_slopes else None,
        "soft_cap": soft_cap,
    }
    plan = reference.plan_attention(batch, window, torch.float32, device)
    expected = reference.paged_attention(query, storage.decode(cache), plan, head_dim**-0.5, **extras)
    own = native.plan_invariant_attention if is_invariant else native.plan_attention
    own_plan = own(batch, window, torch.float32, device)
    actual = native.paged_attention(query, cache, own_plan, head_dim**-0.5, **extras)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first_key", [1, 16, 21, 70])
@pytest.mark.parametrize("window", [None, 40])
def test_hidden_keys_take_no_part(first_key: int, window: int | None) -> None:
    """In decodes, and in rows of many tokens. Where only the first keys are hidden, the result is that of a context
    without them."""
    torch.manual_seed(0)
    np.random.seed(0)
    batch = replace(random_batch([(1, 75), (5, 80), (40, 71)], 3, 64, 16), first_key=first_key)
    cache, query = torch.randn(NUM_BLOCKS, 6, 16, 64), torch.randn(46, 9, 64)
    device = torch.device("cpu")
    plan = reference.plan_attention(batch, window, torch.float32, device)
    expected = reference.paged_attention(query, cache, plan, 0.125)
    for plan_attention in (native.plan_attention, native.plan_invariant_attention):
        own_plan = plan_attention(batch, window, torch.float32, device)
        actual = native.paged_attention(query, cache, own_plan, 0.125)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    if first_key == 16 and window is None:
        later = AttentionBatch(batch.query_start_loc, batch.seq_lens - 16, batch.block_tables[:, 1:], 16, 0)
        plan = reference.plan_attention(later, None, torch.float32, device)
        torch.testing.assert_close(reference.paged_attention(query, cache, plan, 0.125), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("group", "window"), [(1, None), (3, 20), (6, None), (7, None)])
def test_proposed_tokens_have_the_bits_of_decodes(dtype: torch.dtype, group: int, window: int | None) -> None:
    """A decode and the 16 tokens that may be proposed behind it, in one step or one by one."""
    torch.manual_seed(3)
    num_new, context, head_dim = 17, 83, 64
    cache, query = random_cache(dtype, 2, 16, head_dim), torch.randn(num_new, 2 * group, head_dim)

    def attended(new: int, before: int, rows: torch.Tensor) -> torch.Tensor:
        whole = after_context([(new, before)])
        batch = batch_of(whole, scattered_tables(whole, NUM_BLOCKS, 16, [0]), 2, head_dim, 16)
        plan = native.plan_attention(batch, window, torch.float32, torch.device("cpu"))
        return native.paged_attention(rows, cache, plan, 0.125)

    together = attended(num_new, context, query)
    for place in range(num_new):
        assert torch.equal(attended(1, context + place, query[place : place + 1])[0], together[place]), place


def test_large_scores_do_not_overflow() -> None:
    batch = random_batch([(3, 40)], 1, 64, 16)
    cache = torch.randn(NUM_BLOCKS, 2, 16, 64) * 40
    query = torch.randn(3, 2, 64) * 40
    device = torch.device("cpu")
    expected = reference.paged_attention(
        query, cache, reference.plan_attention(batch, None, torch.float32, device), 1.0
    )
    actual = native.paged_attention(query, cache, native.plan_attention(batch, None, torch.float32, device), 1.0)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_bytes_beyond_a_sequence_do_not_matter() -> None:
    batch = random_batch([(1, 4)], 1, 16, 16)
    cache = torch.randn(NUM_BLOCKS, 2, 16, 16)
    device = torch.device("cpu")
    plan = native.plan_attention(batch, None, torch.float32, device)
    query = torch.randn(1, 1, 16)
    clean = native.paged_attention(query, cache, plan, 0.25)
    cache[:, :, 5:] = float("nan")
    torch.testing.assert_close(native.paged_attention(query, cache, plan, 0.25), clean)


def test_unsupported_shapes_are_named() -> None:
    assert supports(64, 16, 3)
    assert supports(20, 16, 3)
    assert supports(576, 16, 3)
    assert not supports(592, 16, 3)
    assert not supports(64, 24, 3)
    assert not supports(64, 16, 64)


@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_rope_and_store_equals_rotation_then_store(tokens: int) -> None:
    num_heads, num_kv_heads, head_dim, block_size = 6, 2, 32, 16
    heads = torch.randn(tokens, num_heads + 2 * num_kv_heads, head_dim)
    cos, sin = torch.rand(tokens, 1, head_dim // 2), torch.rand(tokens, 1, head_dim // 2)
    slots = torch.randperm(NUM_BLOCKS * block_size)[:tokens]
    cache = torch.randn(NUM_BLOCKS, 2 * num_kv_heads, block_size, head_dim)
    expected_heads, expected_cache = heads.clone(), cache.clone()
    rope_reference.apply_rope(expected_heads[:, : num_heads + num_kv_heads], cos, sin)
    kv_store.store_kv(expected_heads[:, num_heads:], expected_cache, slots)
    rope.rope_and_store(heads, num_heads, cos, sin, cache, slots)
    torch.testing.assert_close(heads, expected_heads)
    torch.testing.assert_close(cache, expected_cache)


@pytest.mark.parametrize("shape", [(1, 576), (300, 576), (7, 3, 64), (5, 37)])
def test_rms_norm_equals_the_formula(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.rand(shape[-1])
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_reads_heads_inside_wider_rows() -> None:
    wide, weight = torch.randn(11, 8, 32), torch.rand(32)
    torch.testing.assert_close(
        norm.rms_norm(wide[:, 2:5], weight, 1e-5), norm_reference.rms_norm(wide[:, 2:5], weight, 1e-5)
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1, 576), (300, 576), (7, 3, 64), (5, 37)])
def test_layer_norm_equals_the_formula(shape: tuple[int, ...], biased: bool) -> None:
    x, weight = torch.randn(shape) * 3 + 100, torch.rand(shape[-1])
    bias = torch.randn(shape[-1]) if biased else None
    expected = norm_reference.layer_norm(x.double(), weight.double(), bias, 1e-5).float()
    torch.testing.assert_close(norm.layer_norm(x, weight, bias, 1e-5), expected, rtol=1e-4, atol=1e-4)
    wide = torch.randn(11, 8, shape[-1])
    torch.testing.assert_close(
        norm.layer_norm(wide[:, 2:5], weight, bias, 1e-5), norm_reference.layer_norm(wide[:, 2:5], weight, bias, 1e-5)
    )


@pytest.mark.parametrize("kind", library.ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1536), (300, 40), (3, 13)])
def test_activations_equal_their_formulas(tokens: int, size: int, kind: str) -> None:
    x = torch.randn(tokens, 2 * size) * 4
    wide = x.double()  # float32's own erf loses precision if x is negative
    pairs = (
        (activation.activate(x, kind), activation_reference.activate(wide.clone(), kind)),
        (activation.activate_and_mul(x, kind), activation_reference.activate_and_mul(wide.clone(), kind)),
        (activation.activate_and_mul(x, kind, 0.7), activation_reference.activate_and_mul(wide.clone(), kind, 0.7)),
    )
    for found, expected in pairs:
        torch.testing.assert_close(found, expected.float(), rtol=4e-6, atol=1e-7)


@pytest.mark.parametrize("kind", library.ACTIVATIONS)
def test_not_a_number_remains_so(kind: str) -> None:
    assert activation.activate(torch.tensor([[1.0, torch.nan, -3.0]]), kind).isnan().tolist() == [[False, True, False]]


@pytest.mark.parametrize("kind", library.ACTIVATIONS)
def test_rounded_activations_equal_the_references(kind: str) -> None:
    x = torch.randn(3, 24).bfloat16()
    assert torch.equal(activation.activate(x.clone(), kind), activation_reference.activate(x.clone(), kind))
    found = activation.activate_and_mul(x.clone(), kind)
    assert torch.equal(found, activation_reference.activate_and_mul(x.clone(), kind))


@pytest.mark.parametrize(("tokens", "size"), [(1, 1536), (300, 40), (3, 13)])
def test_silu_and_mul_equals_the_formula(tokens: int, size: int) -> None:
    x = torch.randn(tokens, 2 * size) * 8
    torch.testing.assert_close(
        activation.silu_and_mul(x.clone()), activation_reference.silu_and_mul(x.clone()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("size", [8, 13, 32])
def test_gates_far_below_zero_give_zero(size: int) -> None:
    gates = torch.linspace(-400, 400, size)
    x = torch.cat([gates, torch.ones(size)])[None]
    torch.testing.assert_close(
        activation.silu_and_mul(x.clone()), activation_reference.silu_and_mul(x.clone()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 8, 256), (300, 3, 24), (3, 2, 13)])
def test_gates_of_heads_equal_the_formula(tokens: int, heads: int, size: int, by_head: bool) -> None:
    x, wide = torch.randn(tokens, heads, size), torch.randn(tokens, heads + 2, 1 if by_head else size) * 40
    gates = wide[:, 2:]
    expected = activation_reference.gate_heads(x.double(), gates.double()).float()
    torch.testing.assert_close(activation.gate_heads(x, gates), expected, rtol=4e-6, atol=1e-7)
