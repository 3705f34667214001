"""Data types of the paged cache by name, and the memory that they take. `storage` has the layout.

Does not import torch: engines without it, and plans for absent devices, use this module.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from pagemill_kernels.arrays import Array

KVType = Literal["float32", "bfloat16", "float16", "int8", "fp8"]

NUMPY_TYPES: dict[KVType, type[np.generic]] = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.float16,
    "int8": np.int8,
    "fp8": np.uint8,
}
CODES: tuple[KVType, ...] = ("int8", "fp8")
"""8-bit types, with a scale for each token and head."""
NATIVE: tuple[KVType, ...] = ("float32", "bfloat16", "int8")
"""In the order of CacheType in cpu/src/abi.h."""
SCALE_BYTES = 4

_NATIVE_NUMBERS = {np.dtype(NUMPY_TYPES[kind]): number for number, kind in enumerate(NATIVE)}


def token_width(kind: KVType, head_dim: int) -> int:
    """Return the elements of one token in one head, including its scale."""
    return head_dim + SCALE_BYTES if kind in CODES else head_dim


def token_bytes(kind: KVType, head_dim: int) -> int:
    """Return the bytes of one token in one head."""
    return token_width(kind, head_dim) * np.dtype(NUMPY_TYPES[kind]).itemsize


def native_number(cache: Array) -> int:
    """Return the native kernels' number of the cache's type. Raises ValueError for an unsupported type."""
    try:
        return _NATIVE_NUMBERS[cache.dtype]
    except KeyError:
        raise ValueError(f"the native kernels have no cache of {cache.dtype}") from None
