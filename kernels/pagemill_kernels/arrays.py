"""numpy arrays for the native kernels: names of types, bfloat16 values, aligned memory and addresses.

numpy has no bfloat16, so an array of uint16 contains its bits; no other array here is of uint16. 8-bit floats (e4m3)
are stored in uint8, and the objects that contain them have a flag. Does not import torch:
`pagemill_kernels.torch_arrays` turns arrays into tensors.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
FloatType = Literal["float32", "float16", "bfloat16"]

NUMPY_TYPES: dict[FloatType, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


def widened(array: Array) -> NDArray[np.float32]:
    """Return the exact values as float32; the array itself if it is float32 already."""
    if array.dtype != np.uint16:
        return array.astype(np.float32, copy=False)
    return (array.astype(np.uint32) << 16).view(np.float32)


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to bfloat16, to nearest and ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    kept = bits >> 16
    kept &= 1  # in place: one temporary array instead of five
    kept += 0x7FFF
    kept += bits
    kept >>= 16
    halves = kept.astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():
        halves[is_nan] = 0x7FC0
    return halves


ALIGNMENT = 64
"""Bytes of a cache line and of the widest vector; an unaligned vector is read in two parts."""


def address(array: Array) -> int:
    at: int = array.__array_interface__["data"][0]
    return at


def optional_address(array: Array | None) -> int:
    """Return the array's address, or 0 (null) for None."""
    return 0 if array is None else address(array)


def empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """Return an uninitialized array like numpy's, aligned to `ALIGNMENT`."""
    sizes = (shape,) if isinstance(shape, int) else shape
    num_bytes = math.prod(sizes) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -address(memory) % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(sizes)
