"""What the native launchers share: the library that must be there, addresses of tensors, the thread count."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

from pagemill_kernels.cpu import library


def native() -> ctypes.CDLL:
    """The loaded library. Raises RuntimeError where it is absent: `registry.cpu_backend` asks first."""
    loaded = library.load()
    if loaded is None:
        raise RuntimeError(f"native CPU kernels are not there: {library.why_absent()}")
    return loaded


def num_threads() -> int:
    return torch.get_num_threads()


def rows(x: Tensor) -> Tensor:
    """x as [rows, features] with neighbouring features; copies only when it must."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def addresses(values: Iterable[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    """As an array of pointers; `None`: null."""
    listed = list(values)
    return (ctypes.c_void_p * len(listed))(*listed)
