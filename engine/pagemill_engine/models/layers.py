"""What holds weights: products, norms and tables, each built from its declaration and filled from named tensors.

Every layer says which tensors it wants (`shapes`) and takes them (`load`), one layer after another, so that a whole
model is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from pagemill_engine.models.row_order import stacked_order
from pagemill_engine.models.tensors import TensorSource, blocks_stacked, codes_stacked, read_stacked
from pagemill_kernels.experts.parts import FusedExperts
from pagemill_kernels.linear.packed import PackedLinear
from pagemill_kernels.registry import Ops
from pagemill_kernels.torch_arrays import float_type_of, from_torch, to_torch
from pagemill_protocol.models.declaration import LinearSpec, MatrixSpec, NormSpec, Shapes


class Held(Protocol):
    """Something that holds weights."""

    def held(self) -> Any:
        """What lies in memory once it is loaded, a tensor or an object of tensors; layers that share it return the
        same object."""
        ...


class Layer(Held, Protocol):
    """Something with weights, whatever it computes with them."""

    def shapes(self) -> Shapes:
        """The tensors that fill it."""
        ...

    def load(self, source: TensorSource) -> None:
        """Take them, in the type and layout of the device."""
        ...

    def held(self) -> PackedLinear | FusedExperts | Tensor: ...


class Linear:
    """A product with one matrix, made of one or several stored ones stacked by rows, in the device's layout."""

    packed: PackedLinear

    def __init__(self, spec: LinearSpec, ops: Ops, dtype: torch.dtype, order: Tensor | None = None) -> None:
        """`order`: the stacked row that each row of the product is, where they are wanted in another order."""
        self.spec = spec
        self.dtype = dtype
        self.order = stacked_order(spec, order)
        self._ops = ops

    def shapes(self) -> Shapes:
        return self.spec.shapes()

    def load(self, source: TensorSource) -> None:
        self.packed = _packed(self._ops, source, self.spec.weight_shapes(), self._bias(source), self.dtype, self.order)

    def held(self) -> PackedLinear:
        return self.packed

    def __call__(self, x: Tensor) -> Tensor:
        return self.packed(x)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out += self(x), in place."""
        self.packed.add_to(out, x)

    def _bias(self, source: TensorSource) -> Tensor | None:
        """Parts without a bias have zeros where others have one."""
        if not any(part.bias for part in self.spec.parts):
            return None
        bias = torch.zeros(self.spec.out_features, dtype=self.dtype)
        start = 0
        for part in self.spec.parts:
            if part.bias:
                source.read_into(f"{part.name}.bias", from_torch(bias[start : start + part.rows]))
            start += part.rows
        return bias if self.order is None else bias[self.order]


class Norm:
    """RMS norm or layer norm, as declared."""

    weight: Tensor

    def __init__(self, spec: NormSpec, ops: Ops, dtype: torch.dtype, order: Tensor | None = None) -> None:
        """`order`: the stored value that each value of the weight is."""
        self.spec = spec
        self.eps = spec.eps
        self.bias: Tensor | None = None
        self._ops, self._dtype, self._order = ops, dtype, order
        self._normalize = self._rms_norm if spec.kind == "rms" else self._layer_norm

    def shapes(self) -> Shapes:
        return self.spec.shapes()

    def load(self, source: TensorSource) -> None:
        self.weight = self._vector(source, "weight")
        if self.spec.bias:
            self.bias = self._vector(source, "bias")

    def held(self) -> Tensor:
        return self.weight

    def __call__(self, x: Tensor) -> Tensor:
        return self._normalize(x)

    def _rms_norm(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps)

    def _layer_norm(self, x: Tensor) -> Tensor:
        return self._ops.layer_norm(x, self.weight, self.bias, self.eps)

    def _vector(self, source: TensorSource, name: str) -> Tensor:
        # A sum with an offset is not rounded to a type in which the stored weight was exact.
        offset = self.spec.weight_offset if name == "weight" else 0.0
        vector = torch.empty(self.spec.size, dtype=torch.float32 if offset else self._dtype)
        source.read_into(f"{self.spec.name}.{name}", from_torch(vector))
        vector = vector if self._order is None else vector[self._order]
        return (vector + offset if offset else vector).to(self._ops.device)


class Vector:
    """A stored tensor of `size` values, in float32."""

    values: Tensor

    def __init__(self, name: str, size: int, ops: Ops) -> None:
        self._name, self._size, self._ops = name, size, ops

    def shapes(self) -> Shapes:
        return {self._name: (self._size,)}

    def load(self, source: TensorSource) -> None:
        values = torch.empty(self._size)
        source.read_into(self._name, from_torch(values))
        self.values = values.to(self._ops.device)

    def held(self) -> Tensor:
        return self.values


class Embedding:
    """A table of rows; stored as a linear layer's weight, so that a tied head can lend it."""

    rows: PackedLinear

    def __init__(self, name: str, num_rows: int, size: int, ops: Ops, dtype: torch.dtype) -> None:
        self.spec = LinearSpec(size, (MatrixSpec(name=name, rows=num_rows),))
        self.dtype = dtype
        self._ops = ops

    def shapes(self) -> Shapes:
        return self.spec.shapes()

    def load(self, source: TensorSource) -> None:
        pack_rows = lambda matrix, bias: self._ops.pack_rows(matrix)  # noqa: E731
        self.rows = _packed(self._ops, source, self.shapes(), None, self.dtype, None, pack_rows)

    def held(self) -> PackedLinear:
        return self.rows

    def tie(self, head: Linear) -> bool:
        """Read the loaded head's rows from now on; False where its layout cannot give them back."""
        if head.packed.can_gather:
            self.rows = head.packed
        return head.packed.can_gather

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.rows.gather(token_ids).to(self.dtype)


class Table:
    """Learned vectors by position, or by which text of a pair a token belongs to."""

    table: Tensor

    def __init__(self, name: str, num_rows: int, size: int, ops: Ops, dtype: torch.dtype) -> None:
        self._name, self._shape, self._ops, self._dtype = f"{name}.weight", (num_rows, size), ops, dtype

    def shapes(self) -> Shapes:
        return {self._name: self._shape}

    def load(self, source: TensorSource) -> None:
        table = torch.empty(self._shape, dtype=self._dtype)
        source.read_into(self._name, from_torch(table))
        self.table = table.to(self._ops.device)

    def held(self) -> Tensor:
        return self.table

    def __call__(self, rows: Tensor) -> Tensor:
        return self._ops.gather_rows(self.table, rows)


def held_tensors(layer: Held) -> Iterator[Tensor]:
    held = layer.held()
    if isinstance(held, Tensor):
        yield held
        return
    yield from (value for value in vars(held).values() if isinstance(value, Tensor))


def held_bytes(layer: Held) -> int:
    held = layer.held()
    num_bytes: int = held.nbytes if isinstance(held, Tensor) else held.num_bytes
    return num_bytes


def _packed(
    ops: Ops,
    source: TensorSource,
    shapes: Shapes,
    bias: Tensor | None,
    dtype: torch.dtype,
    order: Tensor | None,
    pack: Callable[[Tensor, Tensor | None], PackedLinear] | None = None,
) -> PackedLinear:
    """The named tensors stacked: in the codes they are stored in, or as floats where source or device has no codes."""
    names = list(shapes)
    if ops.pack_blocks is not None and (blocks := blocks_stacked(source, names)) is not None:
        return ops.pack_blocks(blocks if order is None else blocks.reordered(from_torch(order)), bias)
    if ops.pack_codes is not None and (codes := codes_stacked(source, names)) is not None:
        return ops.pack_codes(codes if order is None else codes.reordered(from_torch(order)), bias)
    return (pack or ops.pack_linear)(_read_matrix(ops, source, shapes, dtype, order), bias)


def _read_matrix(ops: Ops, source: TensorSource, shapes: Shapes, dtype: torch.dtype, order: Tensor | None) -> Tensor:
    """In the type that this device holds such weights in."""
    keeps = ops.keeps_bfloat16 and all(source.is_bfloat16(name) for name in shapes)
    held_as = torch.bfloat16 if keeps else ops.weight_dtype or dtype
    matrix = to_torch(read_stacked(source, shapes, float_type_of(held_as)))
    return matrix if order is None else matrix[order]
