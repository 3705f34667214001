"""Weights under the names and in the form that a model declares: a `WeightSource` over that of its files.

It removes differences between checkpoints of one family: prefixes (`stored_names`), unused tensors,
transposed matrices, and a head whose rows are normalized when it is used. Readers see the declared names, [outputs,
inputs] and the values to compute with. The order of a matrix's rows is decided in `decoders.row_order`.
"""

from __future__ import annotations

import math
from copy import copy

import numpy as np

from pagemill_execution.weights.codes import CodeKind
from pagemill_execution.weights.floats import copy_floats
from pagemill_execution.weights.source import CutWeights, WeightSource, stored_bytes
from pagemill_kernels.arrays import Array, FloatType
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_models.declaration.declaration import DecoderSpec, Shapes
from pagemill_models.sharding.slices import Slices, TensorSlice
from pagemill_models.spec.stored_names import declared_names

_SMALLEST_NORM = 1e-12


class DeclaredWeights:
    def __init__(self, source: WeightSource, decoder: DecoderSpec) -> None:
        self._source = source
        stored = source.shapes
        names = declared_names(stored, decoder)
        self._stored_names = {name: at for name, at in names.items() if not decoder.is_ignored(name)}
        self._transposed = transposed_weights(decoder) & self._stored_names.keys()
        if self._transposed and self._has_outputs_first(decoder.shapes()):
            self._transposed = set()
        self._normalized = normalized_weights(decoder) & self._stored_names.keys()
        self._computed = self._transposed | self._normalized
        self._shapes: Shapes = {
            name: stored[at][::-1] if name in self._transposed else stored[at]
            for name, at in self._stored_names.items()
        }
        # Some files store the bias of a router as a matrix of one row.
        for mixture in decoder.mixtures():
            bias = mixture.gating.bias if mixture.gating is not None else None
            if bias is not None and bias in self._shapes:
                self._shapes[bias] = (math.prod(self._shapes[bias]),)

    def _has_outputs_first(self, wanted: Shapes) -> bool:
        """Whether a file stores what is declared as transposed the other way round, as its own class writes it."""
        shapes = ((wanted[name], self._source.shapes[self._stored_names[name]]) for name in self._transposed)
        return any(stored == shape != shape[::-1] for shape, stored in shapes)

    @property
    def shapes(self) -> Shapes:
        return self._shapes

    def read_into(self, name: str, out: Array) -> None:
        if name not in self._computed:
            self._source.read_into(self._stored_names[name], out)
        elif name in self._normalized:
            rows = np.empty(out.shape, dtype=np.float32)
            self._source.read_into(self._stored_names[name], rows)
            rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _SMALLEST_NORM)
            copy_floats(rows, out)
        else:
            stored = np.empty(self._shapes[name][::-1], dtype=out.dtype)
            self._source.read_into(self._stored_names[name], stored)
            copy_floats(stored.T, out)

    def code_kind(self, name: str) -> CodeKind | None:
        """Return the form of a quantized tensor, or None.

        Groups are along the stored rows, so a transposed matrix is read as floats.
        """
        return None if name in self._computed else self._source.code_kind(self._stored_names[name])

    def read_codes(self, name: str) -> GroupCodes | None:
        return None if name in self._computed else self._source.read_codes(self._stored_names[name])

    def read_blocks(self, name: str) -> CodeBlocks | None:
        return None if name in self._computed else self._source.read_blocks(self._stored_names[name])

    def is_bfloat16(self, name: str) -> bool:
        return name not in self._normalized and self._source.is_bfloat16(self._stored_names[name])

    def num_bytes(self, dtype: FloatType, keep_stored: bool) -> int:
        return sum(stored_bytes(self, name, dtype, keep_stored) for name in self._shapes)

    def digest(self) -> str:
        return self._source.digest()

    def cut(self, slices: Slices) -> CutWeights:
        """Cut what is read as it is stored; of transposed matrices, rows are stored as columns."""
        stored = {name: self._turned(name, found) for name, found in slices.items() if name not in self._normalized}
        source, left = self._source.cut({self._stored_names[name]: found for name, found in stored.items()})
        cut = copy(self)
        cut._source = source
        cut._shapes = {
            name: source.shapes[at][::-1] if name in self._transposed else source.shapes[at]
            for name, at in self._stored_names.items()
        }
        uncut = {name: slices[name] for name in slices.keys() - stored.keys()}
        parts = {name: left[at] for name in stored if (at := self._stored_names[name]) in left}
        return CutWeights(cut, uncut | {name: self._turned(name, found) for name, found in parts.items()})

    def _turned(self, name: str, found: TensorSlice) -> TensorSlice:
        """Return a slice of a declared tensor as that of the stored one, or the other way round."""
        return found._replace(dimension=0 if found.dimension else 1) if name in self._transposed else found


def transposed_weights(decoder: DecoderSpec) -> set[str]:
    """Return the names of the weights that are stored transposed."""
    return {f"{part.name}.weight" for linear in decoder.linears() for part in linear.parts if part.transposed}


def normalized_weights(decoder: DecoderSpec) -> set[str]:
    """Return the names of the weights whose rows are normalized to length one."""
    head = decoder.head
    return {f"{head.name}.weight"} if head is not None and head.normalized else set()
