"""silu(gate) * up in one pass; float32."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill_kernels.cpu import launch


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [tokens, 2 * intermediate], gate first, contiguous. Returns [tokens, intermediate]."""
    gate_up = gate_up.contiguous()
    num_tokens, width = gate_up.shape
    out = torch.empty(num_tokens, width // 2)
    launch.native().pagemill_silu_and_mul(
        gate_up.data_ptr(), num_tokens, width // 2, out.data_ptr(), launch.num_threads()
    )
    return out
