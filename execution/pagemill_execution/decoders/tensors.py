"""Reads a layer's tensors from a checkpoint, which `weights.source` implements over files."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from pagemill_kernels.arrays import NUMPY_TYPES, Array, FloatType
from pagemill_kernels.huge_pages import empty_weights
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes, stack, stack_blocks
from pagemill_models.declaration.declaration import LinearSpec, NormSpec
from pagemill_models.declaration.declaration import Shapes as Shapes

Part = TypeVar("Part")


class TensorSource(Protocol):
    """Tensors by their Hugging Face names."""

    @property
    def shapes(self) -> Shapes:
        """The shapes of all tensors."""
        ...

    def read_into(self, name: str, out: Array) -> None:
        """Fill `out` with the tensor: contiguous, shape as in `shapes`, any float type of `kernels.arrays`."""
        ...

    def read_codes(self, name: str) -> GroupCodes | None:
        """Return the tensor's quantized values; None if it is not stored quantized."""
        ...

    def read_blocks(self, name: str) -> CodeBlocks | None:
        """Return the tensor's stored blocks without conversion; None if kernels cannot use them."""
        ...

    def is_bfloat16(self, name: str) -> bool:
        """Whether the tensor is a matrix stored in bfloat16.

        Kept so, it takes half the memory of float32 and loses nothing.
        """
        ...


class PackableForms(NamedTuple):
    """The forms of matrices that an executor packs."""

    dtype: FloatType
    """Type of float matrices."""
    blocks: bool = False
    codes: bool = False
    bfloat16: bool = False
    """Whether float matrices that are stored in bfloat16 stay in it."""


Weight = CodeBlocks | GroupCodes | Array


def read_weight(source: TensorSource, shapes: Shapes, packable: PackableForms, order: Array | None = None) -> Weight:
    """Read the named tensors stacked by rows: quantized as stored, or as floats if source or executor cannot do that.

    Row i of the result is the stored row `order[i]`.
    """
    names = list(shapes)
    if packable.blocks and (blocks := blocks_stacked(source, names)) is not None:
        return blocks if order is None else blocks.reordered(order)
    if packable.codes and (codes := codes_stacked(source, names)) is not None:
        return codes if order is None else codes.reordered(order)
    keeps = packable.bfloat16 and all(source.is_bfloat16(name) for name in names)
    matrix = read_stacked(source, shapes, "bfloat16" if keeps else packable.dtype)
    return matrix if order is None else matrix[order]


def read_bias(source: TensorSource, spec: LinearSpec, dtype: FloatType, order: Array | None = None) -> Array | None:
    """Return the stacked bias, or None. Parts without a bias get zeros if others have one."""
    if not any(part.bias for part in spec.parts):
        return None
    bias = np.zeros(spec.out_features, dtype=NUMPY_TYPES[dtype])
    start = 0
    for part in spec.parts:
        if part.bias:
            source.read_into(part.stored_bias, bias[start : start + part.rows])
        start += part.rows
    return bias if order is None else bias[order]


def read_norm(source: TensorSource, spec: NormSpec, name: str, dtype: FloatType, order: Array | None = None) -> Array:
    """Return a norm's tensor, [size], or [heads, size] where heads have their own. `name`: weight or bias.

    `order`: the stored index of each value.
    """
    if name == "bias":
        vector = read_tensor(source, f"{spec.name}.bias", (spec.size,), dtype)
        return vector if order is None else vector[order]
    if spec.stored is None:
        return np.ones(spec.size, dtype=NUMPY_TYPES[dtype])
    if spec.heads is not None:
        parts = [read_tensor(source, *each, dtype).reshape(-1, spec.size) for each in spec.weight_shapes().items()]
        rows = np.concatenate(parts)
        return rows if order is None else np.take(rows, order, axis=1)
    # What is computed of a stored weight is not rounded to the type in which that was exact.
    exact = spec.weight_offset == 0.0 and spec.factor == 1.0
    vector = read_tensor(source, f"{spec.name}.{spec.stored}", (spec.size,), dtype if exact else "float32")
    vector = vector if order is None else vector[order]
    return vector if exact else vector * np.float32(spec.factor) + np.float32(spec.weight_offset)


def read_tensor(source: TensorSource, name: str, shape: tuple[int, ...], dtype: FloatType) -> Array:
    out = empty_weights(shape, NUMPY_TYPES[dtype])
    source.read_into(name, out)
    return out


def read_stacked(source: TensorSource, shapes: Shapes, dtype: FloatType) -> Array:
    """Return the named tensors as floats, stacked by rows."""
    sizes = list(shapes.values())
    out = empty_weights((sum(size[0] for size in sizes), *sizes[0][1:]), NUMPY_TYPES[dtype])
    start = 0
    for name, size in shapes.items():
        source.read_into(name, out[start : start + size[0]])
        start += size[0]
    return out


def codes_stacked(source: TensorSource, names: list[str]) -> GroupCodes | None:
    """Return the named tensors' quantized values stacked by rows; None unless all are stored in one form."""
    parts = _read_all(source.read_codes, names)
    return None if parts is None else stack(parts)


def blocks_stacked(source: TensorSource, names: list[str]) -> CodeBlocks | None:
    """Return the named tensors' blocks stacked by rows; None unless all are stored in blocks of one kind."""
    parts = _read_all(source.read_blocks, names)
    return None if parts is None else stack_blocks(parts)


def _read_all(read: Callable[[str], Part | None], names: list[str]) -> list[Part] | None:
    """Read all parts. Returns None at the first one that is not available."""
    parts: list[Part] = []
    for name in names:
        part = read(name)
        if part is None:
            return None
        parts.append(part)
    return parts
