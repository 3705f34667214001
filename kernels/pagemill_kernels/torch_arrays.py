"""Converts numpy arrays to tensors and back, over the same memory. `pagemill_kernels.arrays` describes bfloat16."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from pagemill_kernels.arrays import Array, FloatType

_FLOAT_TYPES: dict[torch.dtype, FloatType] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
TORCH_TYPES: dict[FloatType, torch.dtype] = {name: dtype for dtype, name in _FLOAT_TYPES.items()}


def to_torch(array: Array) -> Tensor:
    """Return a CPU tensor over the same memory; uint16 is bfloat16.

    The tensor of a read-only array must not be written.
    """
    if array.dtype == np.uint16:
        return to_torch(array.view(np.int16)).view(torch.bfloat16)
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def from_torch(tensor: Tensor) -> Array:
    """Return an array over the same memory. The tensor is on the CPU and of a type that `to_torch` returns."""
    if tensor.dtype == torch.bfloat16:
        array: Array = tensor.view(torch.int16).numpy().view(np.uint16)
        return array
    return tensor.numpy()


def float_type_of(dtype: torch.dtype) -> FloatType:
    """Return the name of a float type. Raises KeyError for other types."""
    return _FLOAT_TYPES[dtype]
