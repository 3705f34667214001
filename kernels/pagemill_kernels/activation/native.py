"""silu(gate) * up in one pass; float32 arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill_kernels.cpu import launch


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
