"""The interface to a model's weights, independent of their file format."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from pagemill_execution.weights.codes import CodeKind
from pagemill_kernels.arrays import NUMPY_TYPES, Array, FloatType
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_models.sharding.slices import Slices


class CutWeights(NamedTuple):
    """Weights of which some tensors are parts."""

    source: WeightSource
    left: Slices
    """Parts that are still to be cut out of what the source reads."""


class WeightSource(Protocol):
    """Tensors of a model by their Hugging Face names."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors in the files."""
        ...

    def read_into(self, name: str, out: Array) -> None:
        """Fill `out` with the tensor: contiguous, shape as in `shapes`, any float type of `kernels.arrays`."""
        ...

    def code_kind(self, name: str) -> CodeKind | None:
        """Return the form of a quantized tensor; None if it is not stored quantized."""
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

    def num_bytes(self, dtype: FloatType, keep_stored: bool) -> int:
        """Return the memory of all tensors: as `dtype`, or with `keep_stored` quantized or in bfloat16 where stored
        so."""
        ...

    def digest(self) -> str:
        """Return the hex digest of the weights' content, of all of it in a cut source too; see `weights.digest`."""
        ...

    def cut(self, slices: Slices) -> CutWeights:
        """Return a source that reads nothing but these parts of tensors, as far as their form allows."""
        ...


def stored_bytes(source: WeightSource, name: str, dtype: FloatType, keep_stored: bool) -> int:
    """Return the bytes of one tensor. Arguments: as for `num_bytes`."""
    kind = source.code_kind(name) if keep_stored else None
    kept = NUMPY_TYPES["bfloat16" if keep_stored and source.is_bfloat16(name) else dtype]
    return int(math.prod(source.shapes[name]) * (8 * kept.itemsize if kind is None else kind.stored_bits) / 8)
