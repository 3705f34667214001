"""RMS norm in one pass over each row; float32."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill_kernels.cpu import launch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., hidden], rows contiguous within their first axis; weight: [hidden]. Returns a new tensor like x."""
    size = x.shape[-1]
    if x.dim() > 2 and not (x.stride(-1) == 1 and x.stride(-2) == size):
        x = x.contiguous()
    out = torch.empty(x.shape)
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
        launch.num_threads(),
    )
    return out
