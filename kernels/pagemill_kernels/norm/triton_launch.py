"""Launches RMS norm and layer norm in one pass over each row, several short rows per program."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pagemill_kernels.gpu import launch
from pagemill_kernels.norm import triton_body

PROGRAM_ELEMENTS = 1024
"""Rows shorter than this share a program."""
MAX_SIZE = 32768
"""Most elements of a row that fit into a program's registers."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Normalise x and return a new tensor like it.

    x: [..., size], rows contiguous within their first axis; weight: [size]. `residual`: contiguous, like x; x is added
    to it first, and the sum is normalised.
    """
    return _normalized(x, weight, None, eps, residual, centers=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """Normalise x around its mean; bias: [size]. Other arguments: as for `rms_norm`."""
    return _normalized(x, weight, bias, eps, residual, centers=True)


def _normalized(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None, *, centers: bool
) -> Tensor:
    _check(x, weight, bias, residual)
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    outer, inner, outer_stride, inner_stride = _rows(x)
    padded_size = triton.next_power_of_2(size)
    rows = max(1, PROGRAM_ELEMENTS // padded_size)
    triton_body.normalize[(triton.cdiv(outer * inner, rows),)](
        num_rows=outer * inner,
        eps=eps,
        x_ptr=x,
        x_outer_stride=outer_stride,
        x_inner_stride=inner_stride,
        residual_ptr=x if residual is None else residual,
        weight_ptr=weight,
        bias_ptr=weight if bias is None else bias,
        out_ptr=out,
        INNER=inner,
        SIZE=size,
        PADDED_SIZE=padded_size,
        ROWS=rows,
        HAS_RESIDUAL=residual is not None,
        CENTERS=centers,
        HAS_BIAS=bias is not None,
        enable_fp_fusion=True,
        num_warps=num_warps(padded_size),
    )
    return out


def num_warps(padded_size: int) -> int:
    return min(16, max(4, padded_size // 512))


def _rows(x: Tensor) -> tuple[int, int, int, int]:
    """Return the numbers of (outer, inner) rows and their strides."""
    if x.dim() == 3:
        return x.shape[0], x.shape[1], x.stride(0), x.stride(1)
    flat = x.view(-1, x.shape[-1])
    return flat.shape[0], 1, flat.stride(0), 0


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    size = x.shape[-1]
    vectors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    launch.check_floats("norm", x=x, **vectors)
    launch.check_contiguous("norm", **vectors)
    for name, vector in vectors.items():
        launch.check_shape("norm", name, vector, (size,))
    if residual is not None:
        launch.check_shape("norm", "residual", residual, tuple(x.shape))
        launch.check_contiguous("norm", residual=residual)
        if residual.dtype != x.dtype:
            raise ValueError(f"norm: the residual is {residual.dtype}, x is {x.dtype}; one type is needed")
        launch.check_floats("norm", x=x, residual=residual)
    if x.stride(-1) != 1 or size > MAX_SIZE:
        raise ValueError(
            f"norm: x is {list(x.shape)} with strides {list(x.stride())}; rows of up to {MAX_SIZE} "
            "neighbouring elements are normalised"
        )
