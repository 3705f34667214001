"""RMS norm in one pass over each row; float32 arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill_kernels.cpu import launch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: float32 [..., hidden], rows contiguous within their first axis; weight: [hidden]. Returns a new tensor like
    x."""
    return _normalized(x, weight, eps, torch.float32)


def rms_norm_to_bfloat16(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `rms_norm`, rounded for a bfloat16 product."""
    return _normalized(x, weight, eps, torch.bfloat16)


def _normalized(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    size = x.shape[-1]
    if x.dim() > 2 and not (x.stride(-1) == 1 and x.stride(-2) == size):
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype)
    groups, count = (x.shape[0], x.shape[1:-1].numel()) if x.dim() > 1 else (1, 1)
    group_stride = x.stride(0) if x.dim() > 1 else size
    launch.native().pagemill_rms_norm(
        x.data_ptr(),
        groups,
        group_stride,
        count,
        size,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        count * size,
        dtype == torch.bfloat16,
        launch.num_threads(),
    )
    return out
