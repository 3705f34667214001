"""Layers with weights: linear layers, norms and tables, each built from its declaration and filled from named tensors.

Every layer names its tensors (`shapes`) and loads them (`load`), one layer after another, so that a whole model is
never in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pagemill_execution.decoders.on_torch.context import ProductContext
from pagemill_execution.decoders.row_order import Order, stacked_order
from pagemill_execution.decoders.tensors import (
    PackableForms,
    TensorSource,
    Weight,
    read_bias,
    read_norm,
    read_tensor,
    read_weight,
)
from pagemill_kernels.experts.parts import FusedExperts
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_kernels.linear.packed import PackedLinear
from pagemill_kernels.ranks.group import RankGroup
from pagemill_kernels.registry import Ops
from pagemill_kernels.torch_arrays import float_type_of, to_torch
from pagemill_models.declaration.caches import kernels
from pagemill_models.declaration.declaration import LinearSpec, NormSpec, Shapes


class HasWeights(Protocol):
    """An object with weights."""

    def held(self) -> Any:
        """Return the loaded weights, a tensor or an object of tensors; layers that share weights return the same
        object."""
        ...


class Layer(HasWeights, Protocol):
    """A layer with weights, whatever it computes."""

    def shapes(self) -> Shapes:
        """Return the shapes of its tensors by name."""
        ...

    def load(self, source: TensorSource) -> None:
        """Load its tensors in the type and layout of the device."""
        ...

    def held(self) -> PackedLinear | FusedExperts | Tensor: ...


class Linear:
    """A linear layer: one matrix, made of one or several stored ones stacked by rows, in the device's layout."""

    packed: PackedLinear

    def __init__(self, spec: LinearSpec, ops: Ops, dtype: torch.dtype, number: int, order: Order | None = None) -> None:
        """Build the layer.

        `number`: as in `pagemill_models.sharding.linears`. `order`: the stacked row of each output, if it differs from
        the stored order.
        """
        self.spec = spec
        self.number = number
        self.dtype = dtype
        self.order = stacked_order(spec, order)
        self._ops = ops

    def shapes(self) -> Shapes:
        return self.spec.shapes()

    def load(self, source: TensorSource) -> None:
        bias = read_bias(source, self.spec, float_type_of(self.dtype), self.order)
        weight = read_weight(source, self.spec.weight_shapes(), _packable_forms(self._ops, self.dtype), self.order)
        self.packed = _packed(self._ops, weight, None if bias is None else to_torch(bias), self._ops.pack_linear)

    def held(self) -> PackedLinear:
        return self.packed

    def __call__(self, x: Tensor, context: ProductContext) -> Tensor:
        out = self.packed(x)
        if context.adapters is not None:
            context.adapters.add_to(self.number, out, x)
        return out

    def add_to(self, out: Tensor, x: Tensor, context: ProductContext) -> None:
        """Add self(x) to `out` in place."""
        self.packed.add_to(out, x)
        if context.adapters is not None:
            context.adapters.add_to(self.number, out, x)


class Norm:
    """RMS norm or layer norm, as declared."""

    weight: Tensor

    def __init__(self, spec: NormSpec, ops: Ops, dtype: torch.dtype, order: Order | None = None) -> None:
        """Build the norm. `order`: the stored index of each value of the weight."""
        self.spec = spec
        self.eps = spec.eps
        self.bias: Tensor | None = None
        self._ops, self._dtype, self._order = ops, dtype, order
        self._normalize = self._rms_norm if spec.kind == "rms" else self._layer_norm
        self._of_heads: Tensor | None = None

    def shapes(self) -> Shapes:
        return self.spec.shapes()

    def load(self, source: TensorSource) -> None:
        self.weight = self._vector(source, "weight")
        if self.spec.heads is not None:
            self._of_heads, self.weight = self.weight, torch.ones_like(self.weight[0])
        if self.spec.bias:
            self.bias = self._vector(source, "bias")

    def held(self) -> Tensor:
        return self.weight if self._of_heads is None else self._of_heads

    def __call__(self, x: Tensor) -> Tensor:
        normed = self._normalize(x)
        return normed if self._of_heads is None else (normed * self._of_heads).to(x.dtype)

    def of_ranks(self, x: Tensor, group: RankGroup[Tensor]) -> Tensor:
        """Normalise rows of which other ranks have further values. x: [tokens, size]."""
        part = self.spec.part
        assert part is not None
        wide = x.float()
        squares = wide.square().sum(-1) if part.adds else torch.zeros(len(x), device=x.device)
        group.all_reduce(squares)
        scale = torch.rsqrt(squares / part.whole_size + self.eps)[:, None]
        return (self.weight * (wide * scale).to(x.dtype)).to(x.dtype)

    def _rms_norm(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps)

    def _layer_norm(self, x: Tensor) -> Tensor:
        return self._ops.layer_norm(x, self.weight, self.bias, self.eps)

    def _vector(self, source: TensorSource, name: str) -> Tensor:
        vector = read_norm(source, self.spec, name, float_type_of(self._dtype), self._order)
        return to_torch(vector).to(self._ops.device, copy=True)


class VectorWeights:
    """A stored tensor that is no matrix, in float32."""

    values: Tensor

    def __init__(self, name: str, shape: tuple[int, ...], ops: Ops) -> None:
        self._name, self._shape, self._ops = name, shape, ops

    def shapes(self) -> Shapes:
        return {self._name: self._shape}

    def load(self, source: TensorSource) -> None:
        values = read_tensor(source, self._name, self._shape, "float32")
        self.values = to_torch(values).to(self._ops.device, copy=True)

    def held(self) -> Tensor:
        return self.values


class Taps:
    """The kernel of a convolution of single channels, stored in parts [channels, 1, width], as [width, channels]."""

    values: Tensor

    def __init__(self, channels: Mapping[str, int], width: int, ops: Ops) -> None:
        """Build the kernel. `channels`: of each part, by its name."""
        self._shapes, self._ops = kernels(dict(channels), width), ops

    def shapes(self) -> Shapes:
        return self._shapes

    def load(self, source: TensorSource) -> None:
        parts = [read_tensor(source, name, shape, "float32")[:, 0] for name, shape in self._shapes.items()]
        self.values = to_torch(np.ascontiguousarray(np.concatenate(parts).T)).to(self._ops.device, copy=True)

    def held(self) -> Tensor:
        return self.values


class Embedding:
    """A table of rows, stored as a linear layer's weight, so that it can share a tied head's matrix."""

    rows: PackedLinear

    def __init__(self, spec: LinearSpec, ops: Ops, dtype: torch.dtype, number: int, first_row: int | None) -> None:
        """Build the table. `first_row`: the first token that this rank has, where ranks divide the vocabulary."""
        self.spec = spec
        self.dtype = dtype
        self.number = number
        self._ops, self._first_row = ops, first_row

    def shapes(self) -> Shapes:
        return self.spec.shapes()

    def load(self, source: TensorSource) -> None:
        weight = read_weight(source, self.shapes(), _packable_forms(self._ops, self.dtype))
        self.rows = _packed(self._ops, weight, None, lambda matrix, bias: self._ops.pack_rows(matrix))

    def held(self) -> PackedLinear:
        return self.rows

    def tie(self, head: Linear) -> bool:
        """Read the loaded head's rows from now on. Returns False if its layout does not allow that."""
        if head.packed.can_gather:
            self.rows = head.packed
        return head.packed.can_gather

    def __call__(self, token_ids: Tensor, context: ProductContext) -> Tensor:
        if self._first_row is not None:
            return self._of_ranks(token_ids, self._first_row, context)
        rows = self.rows.gather(token_ids).to(self.dtype)
        if context.adapters is not None:
            context.adapters.add_rows(self.number, rows, token_ids)
        return rows

    def _of_ranks(self, token_ids: Tensor, first_row: int, context: ProductContext) -> Tensor:
        assert context.group is not None
        ids = token_ids - first_row
        is_own = (ids >= 0) & (ids < self.spec.out_features)
        rows = self.rows.gather(ids.where(is_own, 0)).float().masked_fill_(~is_own[:, None], 0.0)
        if context.adapters is not None:
            context.adapters.add_rows(self.number, rows, ids.where(is_own, -1))
        context.group.all_reduce(rows)
        return rows.to(self.dtype)


class Table:
    """Learned vectors by position, or by the text of a pair that a token belongs to."""

    table: Tensor

    def __init__(self, name: str, num_rows: int, size: int, ops: Ops, dtype: torch.dtype) -> None:
        self._name, self._shape, self._ops, self._dtype = f"{name}.weight", (num_rows, size), ops, dtype

    def shapes(self) -> Shapes:
        return {self._name: self._shape}

    def load(self, source: TensorSource) -> None:
        table = read_tensor(source, self._name, self._shape, float_type_of(self._dtype))
        self.table = to_torch(table).to(self._ops.device, copy=True)

    def held(self) -> Tensor:
        return self.table

    def __call__(self, rows: Tensor) -> Tensor:
        return self._ops.gather_rows(self.table, rows)


def layer_tensors(layer: HasWeights) -> Iterator[Tensor]:
    held = layer.held()
    if isinstance(held, Tensor):
        yield held
        return
    yield from (value for value in vars(held).values() if isinstance(value, Tensor))


def layer_weight_bytes(layer: HasWeights) -> int:
    held = layer.held()
    num_bytes: int = held.nbytes if isinstance(held, Tensor) else held.num_bytes
    return num_bytes


def _packable_forms(ops: Ops, dtype: torch.dtype) -> PackableForms:
    """Return the form in which this device stores matrices. `dtype`: type of the values between matmuls."""
    return PackableForms(
        dtype=float_type_of(ops.weight_dtype or dtype),
        blocks=ops.pack_blocks is not None,
        codes=ops.pack_codes is not None,
        bfloat16=ops.weight_forms.bfloat16,
    )


def _packed(
    ops: Ops, weight: Weight, bias: Tensor | None, pack: Callable[[Tensor, Tensor | None], PackedLinear]
) -> PackedLinear:
    """Pack a weight. `pack` packs floats."""
    if isinstance(weight, CodeBlocks):
        assert ops.pack_blocks is not None
        return ops.pack_blocks(weight, bias)
    if isinstance(weight, GroupCodes):
        assert ops.pack_codes is not None
        return ops.pack_codes(weight, bias)
    return pack(to_torch(weight), bias)
