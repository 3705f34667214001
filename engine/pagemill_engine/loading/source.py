"""What a model's weights look like to whoever fills them in, whatever file they lie in."""

from __future__ import annotations

import math
from typing import Protocol

from pagemill_engine.loading.codes import CodeKind
from pagemill_kernels.arrays import NUMPY_TYPES, Array, FloatType
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes


class WeightSource(Protocol):
    """Tensors of a model by their Hugging Face names."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor in the files."""
        ...

    def read_into(self, name: str, out: Array) -> None:
        """Fill `out` with the tensor: contiguous, shape as in `shapes`, any float type of `kernels.arrays`."""
        ...

    def code_kind(self, name: str) -> CodeKind | None:
        """Of the codes that the tensor is stored in; `None` where it is stored otherwise."""
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

    def num_bytes(self, dtype: FloatType, keep_stored: bool) -> int:
        """Memory that all tensors will take: as `dtype`, or as stored where that is codes or bfloat16."""
        ...

    def digest(self) -> str:
        """Hex digest of the weights' content; see `loading.digest`."""
        ...


def stored_bytes(source: WeightSource, name: str, dtype: FloatType, keep_stored: bool) -> int:
    """Of one tensor; arguments as for `num_bytes`."""
    kind = source.code_kind(name) if keep_stored else None
    kept = NUMPY_TYPES["bfloat16" if keep_stored and source.is_bfloat16(name) else dtype]
    return int(math.prod(source.shapes[name]) * (8 * kept.itemsize if kind is None else kind.stored_bits) / 8)
