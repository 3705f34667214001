"""Triton's norms, gated activations, and the rotation with its cache write equal their references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton_device import CODE_TYPES, DEVICE, HAS_GPU, close, random, sparse

from pagemill_kernels.activation import reference as activation_reference
from pagemill_kernels.activation import triton_launch as activation
from pagemill_kernels.kv_store import storage
from pagemill_kernels.norm import reference as norm_reference
from pagemill_kernels.norm import triton_launch as norm
from pagemill_kernels.rope import reference as rope_reference
from pagemill_kernels.rope import triton_launch as rope

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_BLOCKS, BLOCK_SIZE = 12, 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (7, 129), (9, 3, 48), (0, 64)])
def test_rms_norm_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    before = x.clone()
    close(norm.rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)


def test_rms_norm_reads_heads_in_wider_rows() -> None:
    wide, weight = random(11, 8, 32), random(32, seed=1)
    close(norm.rms_norm(wide[:, 2:5], weight, 1e-5), norm_reference.rms_norm(wide[:, 2:5], weight, 1e-5))


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm_equals_the_reference(bias: bool) -> None:
    x, weight, b = random(5, 100) + 3, random(100, seed=1), random(100, seed=2) if bias else None
    close(norm.layer_norm(x, weight, b, 1e-5), norm_reference.layer_norm(x, weight, b, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_and_stored(dtype: torch.dtype) -> None:
    x, residual, weight = (
        random(6, 72, dtype=dtype),
        random(6, 72, dtype=dtype, seed=1),
        random(72, dtype=dtype, seed=2),
    )
    total = x + residual
    both = residual.clone()
    close(norm.rms_norm(x, weight, 1e-5, residual), norm_reference.rms_norm(total, weight, 1e-5))
    close(residual, total)
    close(norm.layer_norm(x, weight, None, 1e-5, both), norm_reference.layer_norm(total, weight, None, 1e-5))


def test_rows_of_a_norm_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="weight is"):
        norm.rms_norm(random(2, 8), random(7), 1e-5)
    with pytest.raises(ValueError, match="neighbouring"):
        norm.rms_norm(random(8, 2).t(), random(8), 1e-5)
    with pytest.raises(ValueError, match="int32"):
        norm.rms_norm(torch.ones(2, 8, dtype=torch.int32, device=DEVICE), random(8), 1e-5)
    with pytest.raises(ValueError, match="weight has strides"):
        norm.rms_norm(random(2, 8), random(8, 2)[:, 0], 1e-5)
    with pytest.raises(ValueError, match="bias is"):
        norm.layer_norm(random(2, 8), random(8), random(9), 1e-5)
    with pytest.raises(ValueError, match="one type is needed"):
        norm.rms_norm(random(2, 8), random(8), 1e-5, random(2, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="residual is"):
        norm.rms_norm(random(2, 8), random(8), 1e-5, random(3, 8))
    with pytest.raises(ValueError, match="residual lies on meta"):
        norm.rms_norm(random(2, 8), random(8), 1e-5, random(2, 8).to("meta"))
    with pytest.raises(ValueError, match="32800"):
        norm.rms_norm(random(1, 32_800), random(32_800), 1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1536), (5, 33), (0, 8)])
def test_gated_activations_equal_the_reference(tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = random(tokens, 2 * size, dtype=dtype) * 4
    close(activation.silu_and_mul(gate_up), activation_reference.silu_and_mul(gate_up.clone()))
    close(activation.gelu_and_mul(gate_up), activation_reference.gelu_and_mul(gate_up.clone()))


def test_gates_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no rows of gate and up"):
        activation.silu_and_mul(random(2, 7))
    with pytest.raises(ValueError, match="no rows of gate and up"):
        activation.gelu_and_mul(random(8, 2).t())
    with pytest.raises(ValueError, match="int32"):
        activation.silu_and_mul(torch.ones(2, 8, dtype=torch.int32, device=DEVICE))


def rotated(tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return heads, cos, sin and slots that are scattered over the cache."""
    angles = random(tokens, 1, head_dim // 2, seed=1)
    order = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(0))
    slots = order[:tokens].to(DEVICE)
    heads = random(tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    return [heads, angles.cos().to(dtype), angles.sin().to(dtype), slots]


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, (4, 4), 64), (7, (6, 2), 80), (3, (32, 8), 128)])
def test_rope_and_store_equals_the_reference_with_and_without_norms(
    tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, has_norms: bool
) -> None:
    num_heads, num_kv_heads = heads
    x, cos, sin, slots = rotated(tokens, num_heads, num_kv_heads, head_dim, dtype)
    cache = random(NUM_BLOCKS, 2 * num_kv_heads, BLOCK_SIZE, head_dim, dtype=dtype, seed=2)
    expected, expected_cache = x.clone(), cache.clone()
    if has_norms:
        weights = [random(head_dim, dtype=dtype, seed=seed) for seed in (3, 4)]
        norms = rope_reference.HeadNorms(*weights, eps=1e-3)
        rope_reference.norm_rope_and_store(expected, num_heads, norms, cos, sin, expected_cache, slots)
        rope.norm_rope_and_store(x, num_heads, norms, cos, sin, cache, slots)
    else:
        rope_reference.rope_and_store(expected, num_heads, cos, sin, expected_cache, slots)
        rope.rope_and_store(x, num_heads, cos, sin, cache, slots)
    close(x, expected)
    close(cache, expected_cache)
    assert int((cache != expected_cache).any(-1).sum()) <= tokens * 2 * num_kv_heads
    assert torch.equal(x[:, num_heads + num_kv_heads :], expected[:, num_heads + num_kv_heads :]), "values stay"


def test_norms_of_heads_that_do_not_fit_are_refused_by_name() -> None:
    x, cos, sin, slots = rotated(3, 4, 2, 32, torch.float32)
    cache = random(NUM_BLOCKS, 4, BLOCK_SIZE, 32)
    short = rope_reference.HeadNorms(random(32), random(31), 1e-5)
    with pytest.raises(ValueError, match="key_weight is"):
        rope.norm_rope_and_store(x, 4, short, cos, sin, cache, slots)
    strided = rope_reference.HeadNorms(random(32, 2)[:, 0], random(32), 1e-5)
    with pytest.raises(ValueError, match="query_weight has strides"):
        rope.norm_rope_and_store(x, 4, strided, cos, sin, cache, slots)


def test_the_cache_may_have_a_narrower_type_than_the_heads() -> None:
    x, cos, sin, slots = rotated(3, 4, 2, 32, torch.float32)
    cache = torch.zeros(NUM_BLOCKS, 4, BLOCK_SIZE, 32, dtype=torch.bfloat16, device=DEVICE)
    rope.rope_and_store(x, 4, cos, sin, cache, slots)
    for token, slot in enumerate(slots.tolist()):
        close(cache[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE], x[token, 4:].bfloat16())


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", CODE_TYPES)
def test_a_quantized_cache_gets_values_and_scales(dtype: torch.dtype) -> None:
    x, cos, sin, slots = rotated(4, 4, 2, 32, torch.float32)
    x[1, 6] = 0.0
    x[2, 7, 5] = float("nan")
    x[3, 6, 1] = float("inf")
    width = storage.token_width(dtype, 32)
    cache = torch.zeros(NUM_BLOCKS, 4, BLOCK_SIZE, width, dtype=dtype, device=DEVICE)
    rope.rope_and_store(x, 4, cos, sin, cache, slots)
    codes, scales = storage.encode(x[:, 4:], dtype)
    decoded, kept = storage.decode(cache), storage.scales(cache)
    largest_step = 1 if dtype == torch.int8 else 32
    for token, slot in enumerate(slots.tolist()):
        at = (slot // BLOCK_SIZE, slice(None), slot % BLOCK_SIZE)
        torch.testing.assert_close(kept[at], scales[token], equal_nan=True)
        step = scales[token, :, None].nan_to_num(0.0, 0.0) * largest_step
        error = (decoded[at] - codes[token].float() * scales[token, :, None]).nan_to_num(0.0).abs()
        assert bool((error <= step * 1.01).all())
        assert int((error > step * 1e-3).sum()) <= 2, "only values exactly between two codes may differ"
    written = cache.view(torch.uint8).flatten(1).any(-1)
    assert int(written.sum()) == len({slot // BLOCK_SIZE for slot in slots.tolist()})


@pytest.mark.skipif(HAS_GPU, reason="the memory is virtual")
@pytest.mark.parametrize("dtype", CODE_TYPES)
def test_slots_beyond_the_2_31st_element_are_written(dtype: torch.dtype, tmp_path: Path) -> None:
    x, cos, sin, _ = rotated(2, 4, 2, 64, torch.float32)
    width = storage.token_width(dtype, 64)
    num_blocks = 2**31 // (4 * BLOCK_SIZE * width) + 2
    far = sparse(tmp_path / "cache", num_blocks * 4 * BLOCK_SIZE * width, dtype).view(num_blocks, 4, BLOCK_SIZE, width)
    near = torch.zeros(2, 4, BLOCK_SIZE, width, dtype=dtype)
    for cache, first in ((near, 0), (far, num_blocks - 2)):
        slots = torch.tensor([3, 17]) + first * BLOCK_SIZE
        rope.rope_and_store(x.clone(), 4, cos, sin, cache, slots)
    assert torch.equal(far[-2:].view(torch.uint8), near.view(torch.uint8))
    assert bool(near.view(torch.uint8).any())


@pytest.mark.parametrize("dtype", [torch.float32, *CODE_TYPES])
def test_blocks_of_a_cache_may_lie_any_stride_apart(dtype: torch.dtype) -> None:
    """As those of one layer do in an arena of several. What lies between them stays."""
    x, cos, sin, slots = rotated(5, 4, 2, 32, torch.float32)
    shape = (NUM_BLOCKS, 4, BLOCK_SIZE, storage.token_width(dtype, 32))
    cache = torch.zeros(shape, dtype=dtype, device=DEVICE)
    memory = torch.zeros(NUM_BLOCKS, cache[0].numel() + 48, dtype=dtype, device=DEVICE)
    apart = memory[:, 16:-32].view(shape)
    for each in (cache, apart):
        rope.rope_and_store(x.clone(), 4, cos, sin, each, slots)
    assert torch.equal(apart.contiguous().view(torch.uint8), cache.view(torch.uint8))
    assert bool(cache.view(torch.uint8).any())
    apart.zero_()
    assert not bool(memory.view(torch.uint8).any())


def test_a_cache_of_another_shape_is_refused_by_name() -> None:
    x, cos, sin, slots = rotated(3, 4, 2, 32, torch.float32)
    with pytest.raises(ValueError, match="cache is"):
        rope.rope_and_store(x, 4, cos, sin, random(NUM_BLOCKS, 6, BLOCK_SIZE, 32), slots)
    with pytest.raises(ValueError, match="int64"):
        rope.rope_and_store(x, 4, cos, sin, random(NUM_BLOCKS, 4, BLOCK_SIZE, 32), slots.int())
    with pytest.raises(ValueError, match="slots is"):
        rope.rope_and_store(x, 4, cos, sin, random(NUM_BLOCKS, 4, BLOCK_SIZE, 32), slots[:2])
    with pytest.raises(ValueError, match="cos is"):
        rope.rope_and_store(x, 4, cos[:2], sin, random(NUM_BLOCKS, 4, BLOCK_SIZE, 32), slots)
    with pytest.raises(ValueError, match="heads has strides"):
        rope.rope_and_store(random(3, 9, 32)[:, :8], 4, cos, sin, random(NUM_BLOCKS, 4, BLOCK_SIZE, 32), slots)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_realistic_size_equal_the_reference(dtype: torch.dtype) -> None:
    x, weight = random(4096, 8192, dtype=dtype), random(8192, dtype=dtype, seed=1)
    close(norm.rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5))
    gate_up = random(4096, 2 * 14336, dtype=dtype)
    close(activation.silu_and_mul(gate_up), activation_reference.silu_and_mul(gate_up.clone()))
