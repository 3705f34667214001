"""Launches gated activations, each in one pass."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pagemill_kernels.activation import triton_body
from pagemill_kernels.gpu import launch

BLOCK = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [tokens, intermediate]. gate_up: [tokens, 2 * intermediate], gate first."""
    return _gated(gate_up, is_gelu=False)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, with GELU's approximation by tanh; shapes as in `silu_and_mul`."""
    return _gated(gate_up, is_gelu=True)


def _gated(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    launch.check_floats("gated activation", gate_up=gate_up)
    num_tokens, width = gate_up.shape
    if gate_up.stride(1) != 1 or width % 2:
        raise ValueError(
            f"gated activation: {list(gate_up.shape)} with strides {list(gate_up.stride())} are no rows "
            "of gate and up side by side"
        )
    out = torch.empty(num_tokens, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        triton_body.gate_and_mul[(num_tokens, triton.cdiv(width // 2, BLOCK))](
            gate_up_ptr=gate_up,
            gate_up_stride=gate_up.stride(0),
            out_ptr=out,
            HALF=width // 2,
            BLOCK=BLOCK,
            IS_GELU=is_gelu,
            enable_fp_fusion=True,
            num_warps=4,
        )
    return out
