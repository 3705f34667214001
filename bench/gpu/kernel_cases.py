"""Everything but attention: inputs, rotation with the cache write, norms, activations, gathers, products in codes,
sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import scaled_cases
import torch
import torch.nn.functional as F
from case import Case
from measuring import Device

from pagemill_kernels.activation import reference as activation_reference
from pagemill_kernels.activation import triton_launch as activation
from pagemill_kernels.gather import reference as gather_reference
from pagemill_kernels.gather import triton_launch as gather
from pagemill_kernels.kv_store import reference as kv_reference
from pagemill_kernels.linear import triton_launch as linear
from pagemill_kernels.linear.groups import GroupCodes
from pagemill_kernels.norm import reference as norm_reference
from pagemill_kernels.norm import triton_launch as norm
from pagemill_kernels.request_rows import reference as rows_reference
from pagemill_kernels.request_rows import triton_launch as request_rows
from pagemill_kernels.request_rows.layout import NUM_COMPUTED_TOKENS, NUM_TOKENS, RowLayout, RowState, StepInputs
from pagemill_kernels.request_rows.staging import Staging
from pagemill_kernels.rope import reference as rope_reference
from pagemill_kernels.rope import triton_launch as rope
from pagemill_kernels.sampling import randomness
from pagemill_kernels.sampling import reference as sampling_reference
from pagemill_kernels.sampling import triton_launch as sampling
from pagemill_kernels.sampling.batch import Draws, SamplingBatch


def cases(device: Device) -> list[Case]:
    """Sizes of Llama-3.1-8B, at 256 decodes and in a prefill of 8,192 tokens."""
    if device.tiny:
        tiny = [_norm(device, 3, 48), _activation(device, 3, 40), _rows(device, 3, 48), _rope(device, 3, (4, 2), 16)]
        tiny.append(_inputs(device, 3, 40))
        products = [*_products(device, 4, (40, 64), [3]), *scaled_cases.cases(device, (40, 64), [3])]
        return [*tiny, *products, *_sampling(device, 2, 70)]
    return [
        *(_norm(device, rows, 4096) for rows in (256, 8192)),
        *(_activation(device, rows, 14_336) for rows in (256, 8192)),
        *(_rope(device, rows, (32, 8), 128) for rows in (256, 8192)),
        _rows(device, 8192, 4096),
        *(_inputs(device, rows, 4096) for rows in (16, 256, 1024)),
        *_products(device, 4, (14_336, 4096), [1, 64, 512]),
        *_products(device, 8, (14_336, 4096), [1, 64, 512]),
        *scaled_cases.cases(device, (14_336, 4096), [1, 64, 512, 8192]),
        *_sampling(device, 256, 151_936),
    ]


def _norm(device: Device, rows: int, size: int) -> Case:
    x, weight = device.random(rows, size), device.random(size, seed=1)
    return Case(
        f"RMS norm, {rows} x {size}",
        lambda: norm.rms_norm(x, weight, 1e-5),
        lambda: norm_reference.rms_norm(x, weight, 1e-5),
        num_bytes=2 * x.nbytes,
        peers={"torch": lambda: F.rms_norm(x, (size,), weight, 1e-5)},
    )


def _activation(device: Device, rows: int, size: int) -> Case:
    gate_up = device.random(rows, 2 * size)
    return Case(
        f"SiLU and product, {rows} x {size}",
        lambda: activation.silu_and_mul(gate_up),
        lambda: activation_reference.silu_and_mul(gate_up.clone()),
        num_bytes=1.5 * gate_up.nbytes,
        peers={"torch": lambda: F.silu(gate_up[:, :size]) * gate_up[:, size:]},
    )


def _rows(device: Device, rows: int, size: int) -> Case:
    table = device.random(64 if device.tiny else 128_256, size)
    ids = torch.arange(rows, device=device.device) * 7919 % len(table)
    return Case(
        f"rows of an embedding, {rows} x {size}",
        lambda: gather.gather_rows(table, ids),
        lambda: gather_reference.gather_rows(table, ids),
        num_bytes=2 * rows * size * table.itemsize,
        peers={"torch": lambda: F.embedding(ids, table)},
    )


def _inputs(device: Device, num_requests: int, context_tokens: int) -> Case:
    """Of decodes: what is read of their rows and written for the forward pass, block tables for the most part."""
    layout = RowLayout.of(num_requests, context_tokens + 1, 16)
    state = RowState(layout, 0, device.device)
    state.tables.copy_(torch.arange(layout.table_width))
    state.tokens.copy_(torch.arange(layout.tokens_width))
    state.records[:, NUM_COMPUTED_TOKENS], state.records[:, NUM_TOKENS] = context_tokens, context_tokens + 1
    rows = np.arange(num_requests + 1, dtype=np.int32)
    _, step = Staging().upload(rows[:-1], rows, rows[:-1], device.device)

    def built(build: Callable[..., None]) -> torch.Tensor:
        inputs = StepInputs.empty(num_requests, num_requests, num_requests, layout.table_width, device.device)
        build(state, step, 1, num_requests, 16, inputs)
        return torch.cat([inputs.token_ids, inputs.positions, inputs.slots, inputs.seq_lens.long()])

    return Case(
        f"inputs of {num_requests} decodes at {context_tokens}",
        lambda: built(request_rows.build_inputs),
        lambda: built(rows_reference.build_inputs),
        num_bytes=2 * 4 * num_requests * (context_tokens // 16 + 1),
        tolerance=0.0,
    )


def _rope(device: Device, tokens: int, heads: tuple[int, int], head_dim: int) -> Case:
    num_heads, num_kv_heads = heads
    x = device.random(tokens, num_heads + 2 * num_kv_heads, head_dim)
    angles = device.random(tokens, 1, head_dim // 2, dtype=torch.float32, seed=1)
    cos, sin = angles.cos().to(device.dtype), angles.sin().to(device.dtype)
    num_blocks = -(-tokens // 16)
    cache = torch.zeros(num_blocks, 2 * num_kv_heads, 16, head_dim, dtype=device.dtype, device=device.device)
    slots = torch.from_numpy(np.random.default_rng(0).permutation(num_blocks * 16)[:tokens]).to(device.device)

    def expected() -> torch.Tensor:
        written = cache.clone()
        planned = kv_reference.plan_slots(slots, 2 * num_kv_heads, 16)
        rope_reference.rope_and_store(x.clone(), num_heads, cos, sin, written, planned)
        return written

    def ours() -> torch.Tensor:
        rope.rope_and_store(again, num_heads, cos, sin, cache, slots)
        return cache

    # Rotated in place: each run but the first starts from rotated heads, which takes as long.
    again = x.clone()
    moved = 2 * x.nbytes + x.nbytes * 2 * num_kv_heads // (num_heads + 2 * num_kv_heads)
    return Case(f"rotation and cache write, {tokens} tokens", ours, expected, num_bytes=moved)


def _products(device: Device, bits: Literal[4, 8], shape: tuple[int, int], rows: list[int]) -> list[Case]:
    generator = torch.Generator().manual_seed(2)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    codes = torch.randint(low, high, shape, generator=generator).to(torch.uint8 if bits == 4 else torch.int8)
    scales = torch.rand(shape[0], shape[1] // 32, generator=generator) / high
    weight = GroupCodes(bits, codes, scales, -8 * scales if bits == 4 else None)
    ours = linear.pack_codes(weight, None)
    floats = weight.dequantize().to(device.device, device.dtype)
    return [_product(device, f"product, {bits} bits", num_rows, ours, floats) for num_rows in rows]


def _product(device: Device, name: str, rows: int, ours: linear.CodesLinear, floats: torch.Tensor) -> Case:
    x = device.random(rows, floats.shape[1], seed=4)
    return Case(
        f"{name}, {rows} x {floats.shape[1]} x {floats.shape[0]}",
        lambda: ours(x),
        lambda: F.linear(x.float(), floats.float()),
        num_bytes=ours.num_bytes + x.nbytes + rows * floats.shape[0] * x.itemsize,
        num_flops=2 * rows * floats.numel(),
        peers={"torch, bfloat16 weights": lambda: F.linear(x, floats)},
    )


def _sampling(device: Device, rows: int, vocab_size: int) -> list[Case]:
    logits = device.random(rows, vocab_size, dtype=torch.float32) * 3
    keys = randomness.keys(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.int64), np.zeros(rows, np.int64))
    ones, zeros, all_tokens = np.ones(rows, np.float32), np.zeros(rows, np.float32), np.full(rows, vocab_size)
    draws = {
        "greedy": None,
        "temperature": Draws(0.8 * ones, all_tokens, ones, zeros, keys),
        "top-p 0.9": Draws(0.8 * ones, all_tokens, 0.9 * ones, zeros, keys),
        "top-k 50, top-p 0.9": Draws(0.8 * ones, np.full(rows, 50), 0.9 * ones, zeros, keys),
    }
    return [_draw(f"sampler, {rows} x {vocab_size}, {name}", logits, each) for name, each in draws.items()]


def _draw(name: str, logits: torch.Tensor, draws: Draws | None) -> Case:
    batch = SamplingBatch(draws)
    peers = {"torch argmax": lambda: logits.argmax(-1)} if draws is None else {}
    return Case(
        name,
        lambda: sampling.draw(logits, logits, draws),
        lambda: torch.from_numpy(sampling_reference.sample_tokens(logits.cpu().clone(), batch).token_ids).to(
            logits.device
        ),
        num_bytes=logits.nbytes,
        peers=peers,
        tolerance=0.0,
    )
