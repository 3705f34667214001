"""The formulas of activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [tokens, intermediate]; may overwrite its input.

    gate_up: [tokens, 2 * intermediate], gate first.
    """
    return activate_and_mul(gate_up, "silu")


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, with GELU's approximation by tanh; shapes as in `silu_and_mul`."""
    return activate_and_mul(gate_up, "gelu_tanh")


def activate_and_mul(gate_up: Tensor, activation: str, limit: float | None = None) -> Tensor:
    """Return activation(gate) * up; shapes as in `silu_and_mul`.

    `limit`: bound of the gate's values and of the magnitudes of up, to which 1 is then added.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    return _FORMULAS[activation](gate) * up


def activate(x: Tensor, activation: str) -> Tensor:
    """Return activation(x) for x [tokens, size]; may overwrite its input. Raises KeyError for an unknown activation."""
    return _FORMULAS[activation](x)


def gate_heads(x: Tensor, gates: Tensor) -> Tensor:
    """Return x times the sigmoid of gates; may overwrite x. x: [tokens, heads, head_dim]. gates: the same, or one for
    each head, [tokens, heads, 1]."""
    return x * gates.sigmoid()


def _gelu_quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_quick": _gelu_quick,
    "relu": F.relu,
    "relu2": _relu2,
}
