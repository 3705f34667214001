"""The formula."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [tokens, 2 * intermediate], gate first. Returns [tokens, intermediate]; may overwrite its input."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """As `silu_and_mul`, with GELU's approximation by tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
