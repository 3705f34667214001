"""Packed matrices, norms and tables of rows, each filled from named tensors by its declaration."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.decoders.row_order import Order, stacked_order
from pagemill_execution.decoders.tensors import PackableForms, TensorSource, Weight, read_bias, read_norm, read_weight
from pagemill_kernels import arrays
from pagemill_kernels.arrays import Array
from pagemill_kernels.decoder_layer.parts import NormParts
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_kernels.linear.native import NativeLinear
from pagemill_kernels.native_ops import NativeOps
from pagemill_kernels.norm import native as norm
from pagemill_models.declaration.declaration import LinearSpec, NormSpec, Shapes

Ids = NDArray[np.int64]


class PlainRows:
    """A table of floats. It is not packed, because it is never multiplied."""

    def __init__(self, table: Array) -> None:
        self._table = table

    @property
    def num_bytes(self) -> int:
        return self._table.nbytes

    def gather(self, ids: Ids) -> Array:
        """Return rows as float32 [tokens, size]."""
        return arrays.widened(self._table[ids])


Rows = NativeLinear | PlainRows


class Parts(NamedTuple):
    """Builds the parts of a model from one source of tensors with one set of operations."""

    source: TensorSource
    ops: NativeOps

    def linear(self, spec: LinearSpec, order: Order | None = None) -> NativeLinear:
        """Return a packed matrix. `order`: the stored row of each output."""
        order = stacked_order(spec, order)
        weight = self._weight(spec.weight_shapes(), order)
        return self._packed(weight, read_bias(self.source, spec, "float32", order))

    def rows(self, shapes: Shapes) -> Rows:
        """Return a table whose rows are read one by one, quantized or as floats."""
        weight = self._weight(shapes, None)
        return PlainRows(weight) if isinstance(weight, np.ndarray) else self._packed(weight, None)

    def norm(self, spec: NormSpec | None, order: Order | None = None) -> NormParts | None:
        if spec is None:
            return None
        return NormParts(
            weight=read_norm(self.source, spec, "weight", "float32", order),
            bias=read_norm(self.source, spec, "bias", "float32", order) if spec.bias else None,
            eps=spec.eps,
            centered=spec.kind == "layer",
            whole_size=0 if spec.part is None else spec.part.whole_size,
            adds=spec.part is None or spec.part.adds,
        )

    def _weight(self, shapes: Shapes, order: Order | None) -> Weight:
        packable = PackableForms(self.ops.weight_type, blocks=True, codes=True, bfloat16=self.ops.keeps_bfloat16)
        return read_weight(self.source, shapes, packable, order)

    def _packed(self, weight: Weight, bias: Array | None) -> NativeLinear:
        if isinstance(weight, CodeBlocks):
            return self.ops.pack_blocks(weight, bias)
        if isinstance(weight, GroupCodes):
            return self.ops.pack_codes(weight, bias)
        return self.ops.pack_linear(weight, bias)


def normalized(x: Array, parts: NormParts | None) -> Array:
    """Normalise x, float32 [tokens, size]; without a norm return x itself."""
    if parts is None:
        return x
    if parts.centered:
        return norm.layer_norm(x, parts.weight, parts.bias, parts.eps)
    return norm.rms_norm(x, parts.weight, parts.eps)


def norm_bytes(parts: NormParts | None) -> int:
    return 0 if parts is None else parts.weight.nbytes
