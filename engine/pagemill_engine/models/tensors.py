"""What a layer asks of whoever holds the checkpoint's tensors; `loading.source` implements it over files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from pagemill_kernels.arrays import NUMPY_TYPES, Array, FloatType
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes, stack, stack_blocks
from pagemill_protocol.models.declaration import Shapes as Shapes

Part = TypeVar("Part")


class TensorSource(Protocol):
    """Tensors by their Hugging Face names."""

    @property
    def shapes(self) -> Shapes:
        """Every tensor that is there."""
        ...

    def read_into(self, name: str, out: Array) -> None:
        """Fill `out` with the tensor: contiguous, shape as in `shapes`, any float type of `kernels.arrays`."""
        ...

    def read_codes(self, name: str) -> GroupCodes | None:
        """The tensor in the codes it is stored in; `None` where it is stored otherwise."""
        ...

    def read_blocks(self, name: str) -> CodeBlocks | None:
        """The stored codes as they lie in the file; `None` where they lie otherwise, or are none."""
        ...

    def is_bfloat16(self, name: str) -> bool:
        """The tensor is a matrix that is stored in bfloat16: kept so it takes half the memory and loses nothing."""
        ...


def read_stacked(source: TensorSource, shapes: Shapes, dtype: FloatType) -> Array:
    """The named tensors one under another."""
    sizes = list(shapes.values())
    out = np.empty((sum(size[0] for size in sizes), *sizes[0][1:]), dtype=NUMPY_TYPES[dtype])
    start = 0
    for name, size in shapes.items():
        source.read_into(name, out[start : start + size[0]])
        start += size[0]
    return out


def codes_stacked(source: TensorSource, names: list[str]) -> GroupCodes | None:
    """The named tensors' codes one under another; `None` unless all are stored in codes that lie together."""
    parts = _read_all(source.read_codes, names)
    return None if parts is None else stack(parts)


def blocks_stacked(source: TensorSource, names: list[str]) -> CodeBlocks | None:
    """The named tensors' blocks one under another; `None` unless all are stored in blocks of one kind."""
    parts = _read_all(source.read_blocks, names)
    return None if parts is None else stack_blocks(parts)


def _read_all(read: Callable[[str], Part | None], names: list[str]) -> list[Part] | None:
    """`None` as soon as one of them is not there: what was read so far was for nothing."""
    parts: list[Part] = []
    for name in names:
        part = read(name)
        if part is None:
            return None
        parts.append(part)
    return parts
