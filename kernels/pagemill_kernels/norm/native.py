"""RMS norm and layer norm over native kernels, each row by itself; float32 arithmetic."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from pagemill_kernels import arrays
from pagemill_kernels.arrays import Array, address, optional_address
from pagemill_kernels.cpu import launch


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Normalise x and return a new array like it.

    x: float32 [..., hidden], rows contiguous within their first axis; weight: [hidden].
    """
    return _normalized(x, weight, eps, np.float32)


def rms_norm_to_bfloat16(x: Array, weight: Array, eps: float) -> Array:
    """Normalise x like `rms_norm`, rounded for a bfloat16 matmul."""
    return _normalized(x, weight, eps, np.uint16)


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """Normalise x around its mean; bias: [hidden]. Other arguments: as for `rms_norm`."""
    x, rows = _rows(x)
    out = arrays.empty(x.shape)
    launch.native().pagemill_layer_norm(
        address(x),
        *rows,
        address(weight),
        optional_address(bias),
        eps,
        address(out),
        rows.neighbours * rows.size,
        launch.num_threads(),
    )
    return out


def _normalized(x: Array, weight: Array, eps: float, dtype: DTypeLike) -> Array:
    x, rows = _rows(x)
    out = arrays.empty(x.shape, dtype)
    launch.native().pagemill_rms_norm(
        address(x),
        *rows,
        address(weight),
        eps,
        address(out),
        rows.neighbours * rows.size,
        dtype == np.uint16,
        launch.num_threads(),
    )
    return out


class _Rows(NamedTuple):
    """`groups` of `neighbours` adjacent rows of `size` values, the groups `stride` values apart."""

    groups: int
    stride: int
    neighbours: int
    size: int


def _rows(x: Array) -> tuple[Array, _Rows]:
    """Return x in a form that the kernels can read; copied only if necessary."""
    size = x.shape[-1]
    are_neighbours = x.ndim < 3 or x.strides[-2] == size * x.itemsize
    if x.ndim > 3 or x.strides[-1] != x.itemsize or not are_neighbours:
        x = np.ascontiguousarray(x)
    if x.ndim == 1:
        return x, _Rows(1, size, 1, size)
    return x, _Rows(x.shape[0], launch.row_stride(x), math.prod(x.shape[1:-1]), size)
