"""What the native launchers share: the library that must be there, rows and addresses of arrays, the thread count."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

import numpy as np

from pagemill_kernels.arrays import Array
from pagemill_kernels.cpu import library

_num_threads = 0
"""0: not set."""


def native() -> ctypes.CDLL:
    """The loaded library. Raises RuntimeError where it is absent: `registry.cpu_backend` asks first."""
    loaded = library.load()
    if loaded is None:
        raise RuntimeError(f"native CPU kernels are not there: {library.why_absent()}")
    return loaded


def set_num_threads(number: int) -> None:
    """Of all native kernels of this process, whatever thread calls them."""
    global _num_threads
    _num_threads = number


def num_threads() -> int:
    """As set, or as many as this process may run on."""
    return _num_threads or len(os.sched_getaffinity(0))


def rows(x: Array) -> Array:
    """x as [rows, features] with neighbouring features; copies only when it must."""
    flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.strides[1] == flat.itemsize else np.ascontiguousarray(flat)


def row_stride(x: Array) -> int:
    """Values between the beginnings of two rows of [rows, ...]."""
    return x.strides[0] // x.itemsize


def addresses(values: Iterable[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    """As an array of pointers; `None`: null."""
    listed = list(values)
    return (ctypes.c_void_p * len(listed))(*listed)
