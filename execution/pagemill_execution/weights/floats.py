"""Copies floats into an array of another type, with rounding; several threads copy large arrays."""

from __future__ import annotations

import math

import numpy as np

from pagemill_kernels.arrays import Array, rounded, widened
from pagemill_kernels.pieces import each_piece


def copy_floats(values: Array, out: Array) -> None:
    """Fill `out` with the values. Both have one shape and types of `pagemill_kernels.arrays`."""
    if out.ndim == 0:
        values, out = values.reshape(1), out.reshape(1)
    each_piece(len(out), math.prod(out.shape[1:]), lambda rows: _copy(values[rows], out[rows]))


def _copy(values: Array, out: Array) -> None:
    if values.dtype == out.dtype:
        np.copyto(out, values)
    elif out.dtype == np.uint16:
        out[...] = rounded(widened(values))
    elif values.dtype == np.uint16 and out.dtype == np.float32:
        np.left_shift(values, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, widened(values), casting="same_kind")
