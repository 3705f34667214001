"""Float weights quantized while they are read, one tensor at a time: a `WeightSource` over another one.

Matrices become codes, norms and biases stay floats. The embedding and the output head take 8 bits in every mode: they
are read for every token's meaning and every token's choice, and a few percent of a large model's memory. A matrix whose
inputs are not whole groups stays as it is.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import torch
from torch import Tensor

from pagemill_engine.loading.codes import CodeKind
from pagemill_engine.loading.source import WeightSource
from pagemill_kernels.linear.groups import GROUP_SIZE, CodeBlocks, GroupCodes
from pagemill_kernels.linear.quantize import quantize

Quantization = Literal["int8", "int4"]

KINDS: dict[Quantization, CodeKind] = {"int8": CodeKind(bits=8), "int4": CodeKind(bits=4, has_offsets=True)}
_FULL_WIDTH = ("model.embed_tokens.weight", "lm_head.weight")
_VERSION = 1
"""Part of the digest: raise it when the same floats become other codes."""


class QuantizedWeights:
    """`source` holds floats. Where nothing computes on codes, `read_into` gives the values that the codes stand for."""

    def __init__(self, source: WeightSource, quantization: Quantization) -> None:
        self._source = source
        self._quantization: Quantization = quantization

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._source.shapes

    def read_into(self, name: str, out: Tensor) -> None:
        codes = self.read_codes(name)
        if codes is None:
            self._source.read_into(name, out)
        else:
            out.copy_(codes.dequantize())

    def read_codes(self, name: str) -> GroupCodes | None:
        shape = self.shapes[name]
        kind = self._kind(name, shape)
        if kind is None:
            return None
        weight = torch.empty(shape)
        self._source.read_into(name, weight)
        return quantize(weight, kind.bits)

    def read_blocks(self, name: str) -> CodeBlocks | None:
        return None

    def is_bfloat16(self, name: str) -> bool:
        return self._kind(name, self.shapes[name]) is None and self._source.is_bfloat16(name)

    def num_bytes(self, dtype: torch.dtype, keep_stored: bool) -> int:
        total = 0
        for name, shape in self.shapes.items():
            kind = self._kind(name, shape) if keep_stored else None
            kept = torch.bfloat16 if keep_stored and self.is_bfloat16(name) else dtype
            total += math.prod(shape) * (8 * kept.itemsize if kind is None else kind.stored_bits) // 8
        return total

    def digest(self) -> str:
        """Another one than the floats': rounded weights compute other keys, values and answers."""
        text = f"{self._source.digest()}|{self._quantization}|{GROUP_SIZE}|{_VERSION}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _kind(self, name: str, shape: tuple[int, ...]) -> CodeKind | None:
        if len(shape) != 2 or shape[1] % GROUP_SIZE:
            return None
        return KINDS["int8" if name in _FULL_WIDTH else self._quantization]
