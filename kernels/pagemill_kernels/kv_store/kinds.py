"""Data types of the paged cache by name, and the memory that they take. `storage` has the layout.

Imports neither torch nor numpy: plans for absent devices and an engine's HTTP process use this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pagemill_kernels.arrays import Array

KVType = Literal["float32", "bfloat16", "float16", "int8", "fp8"]

NUMPY_TYPES: dict[KVType, str] = {
    "float32": "f4",
    "bfloat16": "u2",
    "float16": "f2",
    "int8": "i1",
    "fp8": "u1",
}
"""Codes of numpy's types, in the processor's order of bytes."""
ITEM_BYTES: dict[KVType, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
CODES: tuple[KVType, ...] = ("int8", "fp8")
"""8-bit types, with a scale for each token and head."""
NATIVE: tuple[KVType, ...] = ("float32", "bfloat16", "int8")
"""In the order of CacheType in cpu/src/abi.h."""
SCALE_BYTES = 4

_NATIVE_NUMBERS = {NUMPY_TYPES[kind]: number for number, kind in enumerate(NATIVE)}


def token_width(kind: KVType, head_dim: int) -> int:
    """Return the elements of one token in one head, including its scale."""
    return head_dim + SCALE_BYTES if kind in CODES else head_dim


def token_bytes(kind: KVType, head_dim: int) -> int:
    """Return the bytes of one token in one head."""
    return token_width(kind, head_dim) * ITEM_BYTES[kind]


def native_number(cache: Array) -> int:
    """Return the native kernels' number of the cache's type. Raises ValueError for an unsupported type."""
    try:
        return _NATIVE_NUMBERS[cache.dtype.str[1:]]
    except KeyError:
        raise ValueError(f"the native kernels have no cache of {cache.dtype}") from None
