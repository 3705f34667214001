"""In place: the gate half of the input becomes silu(gate), the product is the only new tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [tokens, 2 * intermediate], gate first. Returns [tokens, intermediate]; may overwrite its input."""
    half = gate_up.shape[-1] // 2
    gate = F.silu(gate_up[:, :half], inplace=True)
    return torch.mul(gate, gate_up[:, half:])
