"""Activations, alone or of a gate that is multiplied, in one pass over native kernels; float32 arithmetic."""

from __future__ import annotations

import numpy as np

from pagemill_kernels import arrays
from pagemill_kernels.arrays import Array, address
from pagemill_kernels.cpu import launch, library


def silu_and_mul(gate_up: Array) -> Array:
    """Return silu(gate) * up, [tokens, intermediate], in the input's type.

    gate_up: float32 or bfloat16 [tokens, 2 * intermediate], gate first.
    """
    gate_up = np.ascontiguousarray(gate_up)
    num_tokens, width = gate_up.shape
    out = arrays.empty((num_tokens, width // 2), gate_up.dtype)
    launch.native().pagemill_silu_and_mul(
        address(gate_up),
        num_tokens,
        width // 2,
        address(out),
        gate_up.dtype == np.uint16,
        launch.num_threads(),
    )
    return out


def activate_and_mul(gate_up: Array, activation: str, limit: float | None = None) -> Array:
    """Compute `reference.activate_and_mul` of float32."""
    return _activated(gate_up, gate_up.shape[1] // 2, activation, limit)


def activate(x: Array, activation: str) -> Array:
    """Compute `reference.activate` of float32."""
    return _activated(x, x.shape[1], activation, None)


def gate_heads(x: Array, gates: Array) -> None:
    """Compute `reference.gate_heads` of float32 in place. x: contiguous; the gates of each token: contiguous."""
    num_tokens, num_heads, head_dim = x.shape
    by_head, stride = gates.shape[2] != head_dim, launch.row_stride(gates)
    launch.native().pagemill_gate_heads(
        address(x), num_tokens, num_heads, head_dim, address(gates), stride, by_head, launch.num_threads()
    )


def _activated(x: Array, size: int, activation: str, limit: float | None) -> Array:
    x = np.ascontiguousarray(x)
    out = arrays.empty((len(x), size))
    launch.native().pagemill_activate(
        address(x),
        len(x),
        size,
        library.ACTIVATIONS.index(activation),
        size != x.shape[1],
        limit or 0.0,
        address(out),
        launch.num_threads(),
    )
    return out
