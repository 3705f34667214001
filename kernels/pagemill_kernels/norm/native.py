"""RMS norm and layer norm, each row by itself; float32 arithmetic."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pagemill_kernels.cpu import launch
from pagemill_kernels.norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: float32 [..., hidden], rows contiguous within their first axis; weight: [hidden]. Returns a new tensor like
    x."""
    return _normalized(x, weight, eps, torch.float32)


def rms_norm_to_bfloat16(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `rms_norm`, rounded for a bfloat16 product."""
    return _normalized(x, weight, eps, torch.bfloat16)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """As `rms_norm`, around the mean; bias: [hidden]. Other types than float32 are the reference's."""
    if any(each is not None and each.dtype != torch.float32 for each in (x, weight, bias)):
        return reference.layer_norm(x, weight, bias, eps)
    x, rows = _rows(x)
    out = torch.empty(x.shape)
    launch.native().pagemill_layer_norm(
        x.data_ptr(),
        *rows,
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        eps,
        out.data_ptr(),
        rows.neighbours * rows.size,
        launch.num_threads(),
    )
    return out


def _normalized(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    x, rows = _rows(x)
    out = torch.empty(x.shape, dtype=dtype)
    launch.native().pagemill_rms_norm(
        x.data_ptr(),
        *rows,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        rows.neighbours * rows.size,
        dtype == torch.bfloat16,
        launch.num_threads(),
    )
    return out


class _Rows(NamedTuple):
    """`groups` of so many neighbouring rows of `size`, the groups `stride` values apart."""

    groups: int
    stride: int
    neighbours: int
    size: int


def _rows(x: Tensor) -> tuple[Tensor, _Rows]:
    """x as the kernels can read it; copied only when it must be."""
    size = x.shape[-1]
    are_neighbours = x.dim() < 3 or x.stride(-2) == size
    if x.dim() > 3 or x.stride(-1) != 1 or not are_neighbours:
        x = x.contiguous()
    if x.dim() == 1:
        return x, _Rows(1, size, 1, size)
    return x, _Rows(x.shape[0], x.stride(0), x.shape[1:-1].numel(), size)
