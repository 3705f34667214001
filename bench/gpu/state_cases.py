"""The gated delta rule with its convolution, gate and norm: decodes in one launch, and a prompt in chunks."""

from __future__ import annotations

import numpy as np
import torch
from case import Case
from measuring import Device

from pagemill_kernels.recurrent import reference, triton_launch
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_kernels.recurrent.plan import plan_states
from pagemill_kernels.recurrent.reference import Convolution, DeltaHeads

WIDTH = 4


def case(device: Device, heads: tuple[int, int, int], requests: int, tokens: int) -> Case:
    """Return the case of requests behind a block. `heads`: of keys and of values, and their size."""
    num_keys, num_values, size = heads
    channels, count, on = (2 * num_keys + num_values) * size, requests * tokens, device.device
    x, rates = device.random(count, channels), device.random(count, 2 * num_values, seed=1)
    gates, states = device.random(count, num_values * size, seed=2), torch.rand(requests, num_values, size, size) / size
    decays, biases = torch.linspace(-1, -0.1, num_values), torch.linspace(-3, 0, num_values)
    kernel, weights = Convolution(torch.rand(WIDTH, channels)), DeltaHeads(decays, biases, torch.rand(size) + 0.5, 1e-6)
    of_rows = ((requests, WIDTH - 1, channels), (requests, 17, (num_keys + num_values) * size + num_values))
    windows, log, inputs = (torch.zeros(shape) for shape in (*of_rows, (requests, WIDTH, channels)))
    rows = np.arange(requests)
    batch = StateBatch(
        rows, np.arange(requests + 1) * tokens, rows, 0 * rows, np.zeros((0, 3), dtype=int), 16,
        num_computed=16 + 0 * rows,
    )  # fmt: skip
    caches = states.to(on), windows.to(on), log.to(on), inputs.to(on)
    heads_there = DeltaHeads(decays.to(on), biases.to(on), weights.norm.to(on), weights.eps)
    kernel_there = Convolution(kernel.taps.to(on))
    plan = triton_launch.plan_states(batch)

    def ours() -> torch.Tensor:
        return triton_launch.convolved_rule("delta_rule", x, kernel_there, (rates, gates, heads_there), caches, plan)

    def formulas() -> torch.Tensor:
        given, own = [each.cpu().float() for each in (x, rates, gates)], plan_states(batch)
        mixed = reference.causal_convolution(given[0], kernel, windows.clone(), torch.zeros(inputs.shape), own)
        room = torch.zeros(requests, 16 + tokens, log.shape[2])
        return reference.delta_rule(mixed, given[1], given[2], weights, states.clone(), room, own).to(on)

    num_bytes = 4.0 * states.numel() + count * x.element_size() * (channels + 2 * num_values + num_values * size)
    return Case(
        f"delta rule of {num_values} heads of {size}, {requests} requests of {tokens}",
        ours,
        formulas,
        num_bytes=num_bytes + 4.0 * count * num_values * size,
        num_flops=6.0 * count * num_values * size * size,
    )
