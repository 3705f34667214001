"""Helpers of the native launchers: the loaded library, rows and addresses of arrays, the thread count."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

import numpy as np

from pagemill_kernels.arrays import Array
from pagemill_kernels.cpu import library

_num_threads = 0
"""Number of threads; 0 if it was not set."""


def native() -> ctypes.CDLL:
    """Return the loaded library.

    Raises RuntimeError if there is none, which `registry.cpu_backend` checks before.
    """
    loaded = library.load()
    if loaded is None:
        raise RuntimeError(f"native CPU kernels are not there: {library.unavailable_reason()}")
    return loaded


def set_num_threads(number: int) -> None:
    """Set the number of threads of all native kernels of this process, whatever thread calls them."""
    global _num_threads
    _num_threads = number


def num_threads() -> int:
    """Return the number of threads that was set, or else the cores that this process may use."""
    return _num_threads or len(os.sched_getaffinity(0))


def rows(x: Array) -> Array:
    """Return x as [rows, features] with neighbouring features; copies only if necessary."""
    flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.strides[1] == flat.itemsize else np.ascontiguousarray(flat)


def row_stride(x: Array) -> int:
    """Return the number of values between the beginnings of two rows of [rows, ...]."""
    return x.strides[0] // x.itemsize


def addresses(values: Iterable[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Return an array of pointers; None becomes null."""
    listed = list(values)
    return (ctypes.c_void_p * len(listed))(*listed)
