"""SwiGLU's gate with torch: overwrites the gate half of the input, and allocates only the result."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [tokens, intermediate]; may overwrite its input.

    gate_up: [tokens, 2 * intermediate], gate first.
    """
    half = gate_up.shape[-1] // 2
    gate = F.silu(gate_up[:, :half], inplace=True)
    return torch.mul(gate, gate_up[:, half:])
