"""Quantizes weights while they are read, one tensor at a time: a `WeightSource` over another one.

Matrices are quantized; norms and biases stay floats. The embedding and the output head take 8 bits in every mode: every
token depends on both, and they are a few percent of a large model's memory. Matrices whose inputs are not whole groups,
and those that are stored in as few bits already, stay as they are. With `w8a8` and `fp8` the other matrices are read as
floats, and `pagemill_kernels.scaled_linear` quantizes them on the device.
"""

from __future__ import annotations

import hashlib
import math
from copy import copy
from typing import Literal

import numpy as np

from pagemill_execution.weights.codes import CodeKind
from pagemill_execution.weights.floats import copy_floats
from pagemill_execution.weights.source import CutWeights, WeightSource, stored_bytes
from pagemill_kernels.arrays import Array, FloatType
from pagemill_kernels.linear.groups import GROUP_SIZE, CodeBlocks, GroupCodes
from pagemill_kernels.linear.quantize import quantize
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.sharding.slices import Slices, TensorSlice

Quantization = Literal["int8", "int4", "w8a8", "fp8"]

KINDS: dict[Quantization, CodeKind] = {"int8": CodeKind(bits=8), "int4": CodeKind(bits=4, has_offsets=True)}
SCALED: tuple[Quantization, ...] = ("w8a8", "fp8")
"""Modes that round activations as well and multiply 8-bit values."""
_SCALE_BYTES = 4
_VERSION = 2
"""Part of the digest; raise it when the same floats are rounded to other values."""


class QuantizedWeights:
    """Quantized weights. `read_into` returns dequantized values, for kernels that multiply floats."""

    def __init__(self, source: WeightSource, quantization: Quantization, decoder: DecoderSpec) -> None:
        self.source = source
        self._shapes = source.shapes
        self._quantization: Quantization = quantization
        self._full_width = {f"{each.name}.weight" for each in (decoder.embedding, decoder.head) if each is not None}
        tables = (decoder.embedding.positions, decoder.embedding.token_types)
        self._floats = {f"{table.name}.weight" for table in tables if table is not None}
        self._floats |= decoder.float_matrices()
        """Matrices that are not quantized."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    @property
    def rounds_any(self) -> bool:
        """Whether something in the files is stored in more bits than are asked for."""
        return any(self._rounded_kind(name) is not None or self._is_scaled(name) for name in self.shapes)

    def read_into(self, name: str, out: Array) -> None:
        if self._rounded_kind(name) is None:
            self.source.read_into(name, out)
            return
        codes = self.read_codes(name)
        assert codes is not None
        copy_floats(codes.dequantize(), out)

    def code_kind(self, name: str) -> CodeKind | None:
        return self._rounded_kind(name) or self.source.code_kind(name)

    def read_codes(self, name: str) -> GroupCodes | None:
        kind = self._rounded_kind(name)
        if kind is None:
            return self.source.read_codes(name)
        weight = np.empty(self.shapes[name], dtype=np.float32)
        self.source.read_into(name, weight)
        return quantize(weight, kind.bits)

    def read_blocks(self, name: str) -> CodeBlocks | None:
        return self.source.read_blocks(name) if self._rounded_kind(name) is None else None

    def is_bfloat16(self, name: str) -> bool:
        return self._rounded_kind(name) is None and self.source.is_bfloat16(name)

    def num_bytes(self, dtype: FloatType, keep_stored: bool) -> int:
        total = 0
        for name, shape in self.shapes.items():
            if keep_stored and self._is_scaled(name):
                total += math.prod(shape) + _SCALE_BYTES * shape[0]
            else:
                total += stored_bytes(self, name, dtype, keep_stored)
        return total

    def digest(self) -> str:
        """Return a digest that differs from the source's: rounded weights compute other keys, values and answers."""
        text = f"{self.source.digest()}|{self._quantization}|{GROUP_SIZE}|{_VERSION}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def cut(self, slices: Slices) -> CutWeights:
        """Cut what is rounded where its groups stay whole: others would be rounded otherwise than by one process."""
        whole = {name: found for name, found in slices.items() if self._keeps_groups(name, found)}
        source, left = self.source.cut(whole)
        cut = copy(self)
        cut.source, cut._shapes = source, source.shapes
        return CutWeights(cut, {**left, **{name: slices[name] for name in slices.keys() - whole.keys()}})

    def _keeps_groups(self, name: str, found: TensorSlice) -> bool:
        return found.dimension == 0 or self._rounded_kind(name) is None or found.is_of_units(GROUP_SIZE)

    def _rounded_kind(self, name: str) -> CodeKind | None:
        """Return the form that the tensor is rounded to; None if it is not rounded."""
        shape, stored = self.shapes[name], self.source.code_kind(name)
        if len(shape) != 2 or shape[1] % GROUP_SIZE or name in self._floats:
            return None
        kind = KINDS.get("int8" if name in self._full_width else self._quantization)
        if kind is None or (stored is not None and stored.bits <= kind.bits):
            return None
        return kind

    def _is_scaled(self, name: str) -> bool:
        """Whether the tensor is read as floats for `scaled_linear`, which quantizes it."""
        is_matrix = len(self.shapes[name]) == 2 and name not in self._floats
        return self._quantization in SCALED and is_matrix and self.code_kind(name) is None
