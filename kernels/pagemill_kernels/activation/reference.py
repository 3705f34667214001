"""The formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [tokens, 2 * intermediate], gate first. Returns [tokens, intermediate]; may overwrite its input."""
    return activate_and_mul(gate_up, "silu")


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """As `silu_and_mul`, with GELU's approximation by tanh."""
    return activate_and_mul(gate_up, "gelu_tanh")


def activate_and_mul(gate_up: Tensor, activation: str, limit: float | None = None) -> Tensor:
    """As `silu_and_mul`, with any activation. `limit`: of the gate's values, and of up's magnitudes, to which 1 is
    added."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    return _FORMULAS[activation](gate) * up


def activate(x: Tensor, activation: str) -> Tensor:
    """x: [tokens, size]. Returns a tensor like it; may overwrite its input. KeyError for an unknown activation."""
    return _FORMULAS[activation](x)


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
