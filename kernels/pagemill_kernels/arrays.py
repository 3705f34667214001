"""Arrays of numpy as the native kernels take them: names of types, values of bfloat16, memory and its addresses.

numpy has no bfloat16, so an array of uint16 holds its bits; no other array here is of uint16. Eight-bit floats (e4m3)
lie in uint8, and what holds them says so. Knows no torch: `pagemill_kernels.torch_arrays` turns these into tensors.
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


def float_type(array: Array) -> FloatType:
    """Raises ValueError for an array of anything else."""
    for name, dtype in NUMPY_TYPES.items():
        if array.dtype == dtype:
            return name
    raise ValueError(f"an array of {array.dtype} where float32, float16 or bfloat16 (uint16) is needed")


def widened(array: Array) -> NDArray[np.float32]:
    """The values as float32, exactly; the array itself where it is that already."""
    if array.dtype != np.uint16:
        return array.astype(np.float32, copy=False)
    return (array.astype(np.uint32) << 16).view(np.float32)


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """As bfloat16, to the nearest and of two to the even one; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    kept = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), kept)


ALIGNMENT = 64
"""Bytes of a cache line and of the widest vector: a vector that begins elsewhere is read in two parts."""


def address(array: Array) -> int:
    at: int = array.__array_interface__["data"][0]
    return at


def optional_address(array: Array | None) -> int:
    """0: null."""
    return 0 if array is None else address(array)


def empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """As numpy's, at a multiple of `ALIGNMENT`."""
    sizes = (shape,) if isinstance(shape, int) else shape
    num_bytes = math.prod(sizes) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -address(memory) % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(sizes)
