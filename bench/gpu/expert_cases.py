"""A mixture of experts as one operation: rows sorted by expert, two grouped matmuls, the weighted sum."""

from __future__ import annotations

import torch
from case import Case
from measuring import Device

from pagemill_kernels.experts import reference as plain
from pagemill_kernels.experts import triton_launch as grouped
from pagemill_kernels.experts.parts import ExpertParts, Gate
from pagemill_kernels.linear import reference as plain_linear
from pagemill_kernels.linear import triton_launch as linear

GATE = Gate("silu")


def cases(device: Device, num_experts: int, top_k: int, size: int, inner: int, rows: list[int]) -> list[Case]:
    matrices = [
        (device.random(2 * inner, size, seed=2 * index) * size**-0.5, device.random(size, inner, seed=2 * index + 1))
        for index in range(num_experts)
    ]
    ours = grouped.pack_experts(
        [ExpertParts(linear.pack_linear(up, None), linear.pack_linear(down, None)) for up, down in matrices], GATE
    )
    formulas = plain.pack_experts(
        [
            ExpertParts(plain_linear.pack_linear(up, None), plain_linear.pack_linear(down, None))
            for up, down in matrices
        ],
        GATE,
    )
    return [_case(device, ours, formulas, (num_experts, top_k, size, inner), count) for count in rows]


def _case(
    device: Device,
    ours: grouped.GroupedExperts,
    formulas: plain.PlainExperts,
    shape: tuple[int, int, int, int],
    rows: int,
) -> Case:
    num_experts, top_k, size, inner = shape
    x, logits = device.random(rows, size, seed=1), device.random(rows, num_experts, seed=3)
    chosen, weights = plain.route(logits, top_k, renormalized=True)
    num_read = len(set(chosen.flatten().tolist()))

    def run(experts: grouped.GroupedExperts | plain.PlainExperts) -> torch.Tensor:
        out = torch.zeros_like(x)
        experts.add_to(out, x, chosen, weights)
        return out

    return Case(
        f"{top_k} of {num_experts} experts of {inner}, {rows} rows",
        lambda: run(ours),
        lambda: run(formulas),
        num_bytes=num_read * 3 * inner * size * x.element_size(),
        num_flops=2.0 * rows * top_k * 3 * inner * size,
    )
