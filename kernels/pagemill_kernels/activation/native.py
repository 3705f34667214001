"""Activations, alone or of a gate that is multiplied, in one pass; float32 arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill_kernels.activation import reference
from pagemill_kernels.cpu import launch, library


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up: float32 or bfloat16 [tokens, 2 * intermediate], gate first. Returns [tokens, intermediate] like it."""
    gate_up = gate_up.contiguous()
    num_tokens, width = gate_up.shape
    out = torch.empty(num_tokens, width // 2, dtype=gate_up.dtype)
    launch.native().pagemill_silu_and_mul(
        gate_up.data_ptr(),
        num_tokens,
        width // 2,
        out.data_ptr(),
        gate_up.dtype == torch.bfloat16,
        launch.num_threads(),
    )
    return out


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """As `reference.gelu_and_mul`."""
    return activate_and_mul(gate_up, "gelu_tanh")


def activate_and_mul(gate_up: Tensor, activation: str, limit: float | None = None) -> Tensor:
    """As in `reference`, which computes other types than float32."""
    if gate_up.dtype != torch.float32:
        return reference.activate_and_mul(gate_up, activation, limit)
    return _activated(gate_up, gate_up.shape[1] // 2, activation, limit)


def activate(x: Tensor, activation: str) -> Tensor:
    """As in `reference`, which computes other types than float32."""
    if x.dtype != torch.float32:
        return reference.activate(x, activation)
    return _activated(x, x.shape[1], activation, None)


def _activated(x: Tensor, size: int, activation: str, limit: float | None) -> Tensor:
    x = x.contiguous()
    out = torch.empty(len(x), size)
    launch.native().pagemill_activate(
        x.data_ptr(),
        len(x),
        size,
        library.ACTIVATIONS.index(activation),
        size != x.shape[1],
        limit or 0.0,
        out.data_ptr(),
        launch.num_threads(),
    )
    return out
