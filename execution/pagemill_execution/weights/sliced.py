"""The part of a model's weights that one rank reads: a `WeightSource` over that of the whole model.

`pagemill_models.sharding.shard` says which rows and columns. The source reads nothing else where its form allows it
(`WeightSource.cut`); the rest is cut here out of whole tensors. Quantized columns are taken where groups stay whole,
and read as floats elsewhere; columns in an order of their own (GPTQ's activation order) belong to no range and are
refused.
"""

from __future__ import annotations

import numpy as np

from pagemill_execution.weights.codes import CodeKind
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.source import CutWeights, WeightSource, stored_bytes
from pagemill_kernels.arrays import Array, FloatType
from pagemill_kernels.linear.groups import GROUP_SIZE, CodeBlocks, GroupCodes
from pagemill_models.declaration.declaration import DecoderSpec, Shapes
from pagemill_models.sharding.slices import Slices, TensorSlice


class SlicedTensors:
    def __init__(self, source: WeightSource, whole: DecoderSpec, part: DecoderSpec, slices: Slices) -> None:
        """Read what `part`, the declaration of a rank or stage, needs of the whole model.

        `slices`: the parts of its tensors; others are read whole.
        """
        others = whole.shapes().keys() - part.shapes().keys()
        known = {name: slices[name] for name in slices.keys() & source.shapes.keys()}
        small = {name: found for name, found in known.items() if found.dimension == 2}
        self._source, self._slices = source.cut({name: known[name] for name in known.keys() - small.keys()})
        self._slices |= small
        # Tensors that no declaration knows stay, so that they are found to be unexpected.
        self._shapes: Shapes = {
            name: self._shape(name, shape) for name, shape in self._source.shapes.items() if name not in others
        }

    @property
    def shapes(self) -> Shapes:
        return self._shapes

    def read_into(self, name: str, out: Array) -> None:
        found = self._slices.get(name)
        if found is None:
            self._source.read_into(name, out)
            return
        whole = np.empty(self._source.shapes[name], dtype=out.dtype)
        self._source.read_into(name, whole)
        at = 0
        for first, end in found.ranges:
            size = end - first
            before = (slice(None),) * found.dimension
            out[(*before, slice(at, at + size))] = whole[(*before, slice(first, end))]
            at += size

    def code_kind(self, name: str) -> CodeKind | None:
        kind, found = self._source.code_kind(name), self._slices.get(name)
        if kind is None or found is None or found.dimension == 0:
            return kind
        return kind if found.is_of_units(kind.group_size) else None

    def read_codes(self, name: str) -> GroupCodes | None:
        codes, found = self._source.read_codes(name), self._slices.get(name)
        if codes is None or found is None:
            return codes
        if found.dimension == 0:
            return codes.reordered(_indices(found))
        if codes.input_order is not None:
            raise LoadError(
                "UnsupportedQuantization",
                f"`{name}` stores its columns in an order of its own (activation order), which cannot be divided "
                "among ranks. Use a checkpoint without `desc_act`, or one rank.",
            )
        return codes.with_columns(_indices(found)) if found.is_of_units(codes.group_size) else None

    def read_blocks(self, name: str) -> CodeBlocks | None:
        blocks, found = self._source.read_blocks(name), self._slices.get(name)
        if blocks is None or found is None:
            return blocks
        if found.dimension == 0:
            return blocks.reordered(_indices(found))
        if not found.is_of_units(GROUP_SIZE):
            return None
        return blocks.with_columns(_indices(found))

    def is_bfloat16(self, name: str) -> bool:
        return self._source.is_bfloat16(name)

    def num_bytes(self, dtype: FloatType, keep_stored: bool) -> int:
        return sum(stored_bytes(self, name, dtype, keep_stored) for name in self._shapes)

    def digest(self) -> str:
        """Return the digest of the whole model: every rank's keys and values are part of the same ones."""
        return self._source.digest()

    def cut(self, slices: Slices) -> CutWeights:
        return CutWeights(self, slices)

    def _shape(self, name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        found = self._slices.get(name)
        if found is None:
            return stored
        return found.shape_of(stored)


def _indices(found: TensorSlice) -> Array:
    return np.concatenate([np.arange(first, end) for first, end in found.ranges])
