"""Kernels of the forward pass without attention: rotation and cache write, norms, activations, gathers, matmuls."""

from __future__ import annotations

from typing import Literal, NamedTuple

import expert_cases
import numpy as np
import scaled_cases
import state_cases
import step_cases
import torch
import torch.nn.functional as F
from case import TOLERANCE, Case
from measuring import Device
from scaled_cases import FP8_STEP

from pagemill_kernels.activation import reference as activation_reference
from pagemill_kernels.activation import triton_launch as activation
from pagemill_kernels.adapters.reference import AdapterMatrices, PlainAdapterRows
from pagemill_kernels.adapters.triton_launch import TritonAdapterRows, stacked
from pagemill_kernels.arrays import Array
from pagemill_kernels.gather import reference as gather_reference
from pagemill_kernels.gather import triton_launch as gather
from pagemill_kernels.gpu import launch
from pagemill_kernels.kv_store import storage
from pagemill_kernels.linear import triton_launch as linear
from pagemill_kernels.linear.groups import GroupCodes
from pagemill_kernels.norm import reference as norm_reference
from pagemill_kernels.norm import triton_launch as norm
from pagemill_kernels.rope import reference as rope_reference
from pagemill_kernels.rope import triton_launch as rope
from pagemill_kernels.torch_arrays import to_torch


def cases(device: Device) -> list[Case]:
    """Return the cases in Llama-3.1-8B's sizes, at 256 decodes and in a prefill of 8,192 tokens."""
    if device.tiny:
        tiny = [*_norms(device, 3, 48), *_activations(device, 3, 40), _rows(device, 3, 48)]
        tiny += [*_ropes(device, 3, (4, 2), 16), *_normed_ropes(device, 3, (4, 2), 16), *step_cases.rows(device, 3, 40)]
        products = [*_products(device, 4, (40, 64), [3, 130]), *scaled_cases.cases(device, (40, 64), [3])]
        experts = expert_cases.cases(device, 4, 2, 48, 32, [3])
        states = [state_cases.case(device, (1, 2, 16), 2, tokens) for tokens in (1, 5)]
        return [
            *tiny,
            *states,
            *products,
            *experts,
            _adapters(device, 3, (48, 64), 2),
            *step_cases.sampling(device, 2, 70),
        ]
    return [
        *(case for rows in (256, 8192) for case in _norms(device, rows, 4096)),
        *(case for rows in (256, 8192) for case in _activations(device, rows, 14_336)),
        *(case for rows in (256, 8192) for case in _ropes(device, rows, (32, 8), 128)),
        *(case for rows in (1, 256, 8192) for case in _normed_ropes(device, rows, (16, 8), 128)),
        _rows(device, 8192, 4096),
        *(case for rows in (16, 256, 1024) for case in step_cases.rows(device, rows, 4096)),
        *_products(device, 4, (14_336, 4096), [1, 64, 512]),
        *_products(device, 8, (14_336, 4096), [1, 64, 512]),
        *scaled_cases.cases(device, (14_336, 4096), [1, 64, 512, 8192]),
        *expert_cases.cases(device, 128, 8, 2048, 768, [1, 64, 512]),
        *(_adapters(device, rows, (4096, 4096), 16) for rows in (1, 64, 256)),
        *step_cases.sampling(device, 256, 151_936),
        *(state_cases.case(device, (16, 32, 128), *shape) for shape in ((64, 1), (256, 1), (1, 2048))),
    ]


def _adapters(device: Device, rows: int, shape: tuple[int, int], num_slots: int) -> Case:
    """Return the case of rows in turn of each of `num_slots` adapters of rank 16, and of none."""
    ins, outs = shape
    x, zeros = device.random(rows, ins), torch.zeros(rows, outs, dtype=device.dtype, device=device.device)
    pairs = [
        AdapterMatrices(device.random(16, ins, seed=2 * slot), device.random(outs, 16, seed=2 * slot + 1))
        for slot in range(num_slots)
    ]
    slots = torch.arange(rows, device=device.device) % (num_slots + 1) - 1
    ours = TritonAdapterRows(slots, {0: stacked([*pairs])})
    plain = PlainAdapterRows(slots, {slot: {0: pair} for slot, pair in enumerate(pairs)})

    def added(to: TritonAdapterRows | PlainAdapterRows) -> torch.Tensor:
        out = zeros.clone()
        to.add_to(0, out, x)
        return out

    num_bytes = num_slots * 16 * (ins + outs) * x.itemsize + x.nbytes + 2 * zeros.nbytes
    return Case(
        f"{num_slots} adapters of rank 16, {rows} x {ins} to {outs}",
        lambda: added(ours),
        lambda: added(plain),
        num_bytes=num_bytes,
    )


def _norms(device: Device, rows: int, size: int) -> list[Case]:
    x, weight, bias = device.random(rows, size), device.random(size, seed=1), device.random(size, seed=2)
    added, zeros = device.random(rows, size, seed=3), torch.zeros(rows, size, dtype=device.dtype, device=device.device)

    def with_residual() -> torch.Tensor:
        """Add zeros to the residual, so that every run has the same result."""
        return norm.rms_norm(zeros, weight, 1e-5, added)

    return [
        Case(
            f"RMS norm, {rows} x {size}",
            lambda: norm.rms_norm(x, weight, 1e-5),
            lambda: norm_reference.rms_norm(x, weight, 1e-5),
            num_bytes=2 * x.nbytes,
            peers={"torch": lambda: F.rms_norm(x, (size,), weight, 1e-5)},
        ),
        Case(
            f"RMS norm with residual, {rows} x {size}",
            with_residual,
            lambda: norm_reference.rms_norm(added, weight, 1e-5),
            num_bytes=4 * x.nbytes,
        ),
        Case(
            f"layer norm, {rows} x {size}",
            lambda: norm.layer_norm(x, weight, bias, 1e-5),
            lambda: norm_reference.layer_norm(x, weight, bias, 1e-5),
            num_bytes=2 * x.nbytes,
            peers={"torch": lambda: F.layer_norm(x, (size,), weight, bias, 1e-5)},
        ),
    ]


def _activations(device: Device, rows: int, size: int) -> list[Case]:
    gate_up = device.random(rows, 2 * size)
    gate, up = gate_up.chunk(2, dim=-1)
    return [
        Case(
            f"SiLU and product, {rows} x {size}",
            lambda: activation.silu_and_mul(gate_up),
            lambda: activation_reference.silu_and_mul(gate_up.clone()),
            num_bytes=1.5 * gate_up.nbytes,
            peers={"torch": lambda: F.silu(gate) * up},
        ),
        Case(
            f"GELU and product, {rows} x {size}",
            lambda: activation.gelu_and_mul(gate_up),
            lambda: activation_reference.gelu_and_mul(gate_up),
            num_bytes=1.5 * gate_up.nbytes,
            peers={"torch": lambda: F.gelu(gate, approximate="tanh") * up},
        ),
    ]


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


class _Rotation(NamedTuple):
    """The inputs of a rotation with its cache write."""

    x: torch.Tensor
    """Queries, keys and values: [tokens, heads, head_dim]."""
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    """A slot for each token, in random order."""
    empty: torch.Tensor
    """An empty cache in the computed type."""


def _rotation(device: Device, tokens: int, heads: tuple[int, int], head_dim: int) -> _Rotation:
    """Return the inputs. `heads`: number of heads of queries, and of keys."""
    num_heads, num_kv_heads = heads
    angles = device.random(tokens, 1, head_dim // 2, dtype=torch.float32, seed=1)
    num_blocks = -(-tokens // 16)
    slots = torch.from_numpy(np.random.default_rng(0).permutation(num_blocks * 16)[:tokens]).to(device.device)
    return _Rotation(
        device.random(tokens, num_heads + 2 * num_kv_heads, head_dim),
        angles.cos().to(device.dtype),
        angles.sin().to(device.dtype),
        slots,
        torch.zeros(num_blocks, 2 * num_kv_heads, 16, head_dim, dtype=device.dtype, device=device.device),
    )


def _ropes(device: Device, tokens: int, heads: tuple[int, int], head_dim: int) -> list[Case]:
    """Return cases of a cache in the computed type, and in the 8-bit types that the device supports."""
    num_heads, num_kv_heads = heads
    x, cos, sin, slots, written = _rotation(device, tokens, heads, head_dim)
    rope_reference.rope_and_store(x.clone(), num_heads, cos, sin, written, slots)
    kinds = {"": device.dtype, ", int8 cache": torch.int8, ", fp8 cache": torch.float8_e4m3fn}
    if launch.fp8_problem() is not None:
        del kinds[", fp8 cache"]

    def case(name: str, dtype: torch.dtype) -> Case:
        width = storage.token_width(dtype, head_dim)
        cache = torch.zeros(*written.shape[:3], width, dtype=dtype, device=device.device)
        # The rotation is in place: every run but the first starts from rotated heads, which takes as long.
        again = x.clone()
        first: list[torch.Tensor] = []

        def ours() -> torch.Tensor:
            rope.rope_and_store(again, num_heads, cos, sin, cache, slots)
            if not first:
                first.append(storage.decode(cache))
            return first[0]

        stored = tokens * 2 * num_kv_heads * storage.token_width(dtype, head_dim) * dtype.itemsize
        return Case(
            f"rotation and cache write, {tokens} tokens{name}",
            ours,
            lambda: written,
            num_bytes=2 * x.nbytes + stored,
            tolerance=FP8_STEP if dtype == torch.float8_e4m3fn else TOLERANCE,
        )

    return [case(name, dtype) for name, dtype in kinds.items()]


def _normed_ropes(device: Device, tokens: int, heads: tuple[int, int], head_dim: int) -> list[Case]:
    """Return the case of Qwen3's layers, and of its separate passes as a peer."""
    num_heads, num_kv_heads = heads
    x, cos, sin, slots, ours = _rotation(device, tokens, heads, head_dim)
    norms = rope_reference.HeadNorms(device.random(head_dim, seed=2), device.random(head_dim, seed=3), 1e-6)
    expected = ours.clone()
    rope_reference.norm_rope_and_store(x.clone(), num_heads, norms, cos, sin, expected, slots)
    again, apart = x.clone(), x.clone()
    first: list[torch.Tensor] = []

    def fused() -> torch.Tensor:
        rope.norm_rope_and_store(again, num_heads, norms, cos, sin, ours, slots)
        if not first:
            first.append(ours.clone())
        return first[0]

    def separate() -> torch.Tensor:
        for weight, begin, end in ((norms.query_weight, 0, num_heads), (norms.key_weight, num_heads, -num_kv_heads)):
            view = apart[:, begin:end]
            view.copy_(norm.rms_norm(view, weight, norms.eps))
        rope.rope_and_store(apart, num_heads, cos, sin, ours, slots)
        return ours

    name, num_bytes = f"norms of heads, rotation and cache write, {tokens} tokens", 2 * x.nbytes + ours.nbytes
    return [Case(name, fused, lambda: expected, num_bytes=num_bytes, peers={"separate kernels": separate})]


def _products(device: Device, bits: Literal[4, 8], shape: tuple[int, int], rows: list[int]) -> list[Case]:
    generator = torch.Generator().manual_seed(2)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    codes = torch.randint(low, high, shape, generator=generator).to(torch.uint8 if bits == 4 else torch.int8)
    scales: Array = (torch.rand(shape[0], shape[1] // 32, generator=generator) / high).numpy()
    weight = GroupCodes(bits, codes.numpy(), scales, -8 * scales if bits == 4 else None)
    ours = linear.pack_codes(weight, None)
    floats = to_torch(weight.dequantize()).to(device.device, device.dtype)
    ids = torch.arange(rows[-1], device=device.device) * 7919 % shape[0]
    gathered = Case(
        f"rows of an embedding, {bits} bits, {rows[-1]} x {shape[1]}",
        lambda: ours.gather(ids),
        lambda: floats[ids],
        num_bytes=rows[-1] * (ours.num_bytes / shape[0] + 4 * shape[1]),
    )
    return [gathered, *(_product(device, f"product, {bits} bits", num_rows, ours, floats) for num_rows in rows)]


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
