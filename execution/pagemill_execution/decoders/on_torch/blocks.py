"""The blocks of a layer: attention over the paged cache, and MLPs. `recurrent_blocks` has those over states.

A block computes up to its last matmul (`inner`); the layer calls `output`, which adds to the residual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from pagemill_execution.decoders.on_torch.context import ForwardContext, ProductContext
from pagemill_execution.decoders.on_torch.layers import Layer, Linear, Norm, VectorWeights
from pagemill_execution.decoders.row_order import norm_order, qkv_order
from pagemill_kernels.registry import Ops
from pagemill_kernels.rope.reference import HeadNorms
from pagemill_models.declaration.declaration import AttentionSpec, MLPSpec, NormSpec, QueryGrowth


class LayerOutput(Protocol):
    def __call__(self, x: Tensor, context: ProductContext) -> Tensor: ...

    def add_to(self, out: Tensor, x: Tensor, context: ProductContext) -> None:
        """Add self(x) to `out` in place."""
        ...


class LayerBlock(Protocol):
    @property
    def output(self) -> LayerOutput: ...

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Compute the input of `output`. x: [tokens, hidden]."""
        ...

    def layers(self) -> Iterator[Layer]:
        """Yield all layers with weights."""
        ...


class Attention:
    def __init__(
        self, spec: AttentionSpec, ops: Ops, dtype: torch.dtype, number: int, index: int, rotation: int | None
    ) -> None:
        """Build the layer.

        `number`: that of its first linear layer. `index`: the layer's, that of its KV cache. `rotation`: index
        of its rotary embedding among the model's.
        """
        self.spec = spec
        self.dtype = dtype
        self.qkv = Linear(spec.qkv, ops, dtype, number, qkv_order(spec))
        gates = spec.head_gates
        self.head_gates = None if gates is None else Linear(gates, ops, dtype, number + 1)
        self.output = Linear(spec.output, ops, dtype, number + 1 + (gates is not None))
        self.query_norm = head_norm(spec.query_norm, spec, ops, dtype)
        self.key_norm = head_norm(spec.key_norm, spec, ops, dtype)
        self.value_norm = None if spec.value_norm is None else Norm(spec.value_norm, ops, dtype)
        self.ops = ops
        self._index = index if spec.cache_layer is None else spec.cache_layer
        self._rotation = rotation
        self._num_heads, self._head_dim = spec.num_heads, spec.head_dim
        self._extras: dict[str, Any] = {} if spec.soft_cap is None else {"soft_cap": spec.soft_cap}
        self.sinks = None if spec.sinks is None else VectorWeights(spec.sinks, (spec.num_heads,), ops)
        if spec.alibi_slopes is not None:
            self._extras["alibi_slopes"] = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=ops.device)

    def layers(self) -> Iterator[Layer]:
        yield self.qkv
        yield self.output
        others = (self.head_gates, self.query_norm, self.key_norm, self.value_norm, self.sinks)
        yield from (each for each in others if each is not None)

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        num_tokens, num_heads = x.shape[0], self._num_heads
        # A matmul may return the type of its weights; from here on the model's own type is used.
        heads = self.qkv(x, context).to(self.dtype).view(num_tokens, -1, self._head_dim)
        gates = heads[:, -num_heads:]
        if self.spec.gated:
            heads = heads[:, :-num_heads].contiguous()
        if self.spec.values_are_keys:
            heads = torch.cat([heads, heads[:, num_heads:]], 1)
        query = heads[:, :num_heads]
        cache = context.vectors(self._index)
        # The whole step's keys and values are stored first, so that a prefix hit within the step reads them.
        self._store(heads, cache, context)
        if self.spec.query_growth is not None:
            query.mul_(growth(self.spec.query_growth, context.positions).to(self.dtype))
        plan = context.attention_plans[self.spec.window]
        extras = self._extras if self.sinks is None else self._extras | {"sinks": self.sinks.values}
        attended = self.ops.paged_attention(query, cache, plan, self.spec.scale, **extras)
        if self.spec.gated:
            attended = self.ops.gate_heads(attended, gates)
        if self.head_gates is not None:
            attended = self.ops.gate_heads(attended, self.head_gates(x, context).to(self.dtype)[..., None])
        return attended.view(num_tokens, -1)

    def _store(self, heads: Tensor, cache: Tensor, context: ForwardContext) -> None:
        """Normalise and rotate queries and keys in place as declared, and write keys and values into the cache."""
        num_heads, slots = self._num_heads, context.kv_slots[self.spec.window]
        rotation = None if self._rotation is None else context.rotations[self._rotation]
        if self.spec.cache_layer is not None:
            self._turn_queries(heads, rotation, context)
            return
        if self.value_norm is not None:
            normalize(self.value_norm, heads[:, num_heads + self.spec.num_kv_heads :], context)
        if self.spec.norms_behind_rotation and rotation is not None:
            self.ops.rotate(heads[:, : num_heads + self.spec.num_kv_heads], *rotation)
            rotation = None
        in_one_pass = self.ops.norm_rope_and_store
        if in_one_pass is not None and rotation is not None and (norms := self._norms_of_heads()) is not None:
            in_one_pass(heads, num_heads, norms, *rotation, cache, slots)
            return
        if self.query_norm is not None:
            normalize(self.query_norm, heads[:, :num_heads], context)
        if self.key_norm is not None:
            normalize(self.key_norm, heads[:, num_heads : num_heads + self.spec.num_kv_heads], context)
        if self.spec.clip is not None:
            heads[:, : num_heads + 2 * self.spec.num_kv_heads].clamp_(-self.spec.clip, self.spec.clip)
        if rotation is None:
            self.ops.store(heads, num_heads, cache, slots)
        else:
            self.ops.rope_and_store(heads, num_heads, *rotation, cache, slots)

    def _turn_queries(self, heads: Tensor, rotation: tuple[Tensor, Tensor] | None, context: ForwardContext) -> None:
        """Normalise and rotate queries, whose keys and values another layer has stored."""
        if self.query_norm is not None:
            normalize(self.query_norm, heads, context)
        if rotation is not None:
            self.ops.rotate(heads, *rotation)

    def _norms_of_heads(self) -> HeadNorms | None:
        """Return the norms if both are RMS norms of single heads, which can be computed in the pass of the rotation."""
        query, key = self.query_norm, self.key_norm
        if query is None or key is None or self.spec.clip is not None:
            return None
        alike = query.eps == key.eps and all(
            (norm.spec.kind, norm.spec.size, norm.spec.part, norm.spec.heads) == ("rms", self._head_dim, None, None)
            for norm in (query, key)
        )
        return HeadNorms(query.weight, key.weight, query.eps) if alike else None


class MLP:
    def __init__(self, spec: MLPSpec, ops: Ops, dtype: torch.dtype, number: int) -> None:
        """Build the block. `number`: that of its first linear layer."""
        self.spec = spec
        self.up = Linear(spec.up, ops, dtype, number)
        self.output = Linear(spec.down, ops, dtype, number + 1)
        self._activate = _activation(spec, ops)

    def layers(self) -> Iterator[Layer]:
        yield self.up
        yield self.output

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        return self.activate(x, context)

    def activate(self, x: Tensor, context: ProductContext) -> Tensor:
        return self._activate(self.up(x, context))


class LayerInputMLP(MLP):
    """An MLP whose inner values are multiplied by the inputs of its layer."""

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        first = self.spec.layer_input
        assert first is not None
        assert context.layer_inputs is not None
        inputs = context.layer_inputs[:, first : first + self.spec.intermediate_size]
        return self.activate(x, context) * inputs


def growth(spec: QueryGrowth, positions: Tensor) -> Tensor:
    """Return the factors on queries, float32 [tokens, 1, 1]."""
    steps = torch.floor(positions.double() / spec.length)
    return (1 + spec.beta * torch.log(1 + steps)).float()[:, None, None]


def _activation(spec: MLPSpec, ops: Ops) -> Callable[[Tensor], Tensor]:
    if not spec.gated:
        return lambda x: ops.activate(x, spec.activation)
    fast = {"silu": ops.silu_and_mul, "gelu_tanh": ops.gelu_and_mul} if spec.limit is None else {}
    return fast.get(spec.activation) or (lambda x: ops.activate_and_mul(x, spec.activation, spec.limit))


def head_norm(norm: NormSpec | None, spec: AttentionSpec, ops: Ops, dtype: torch.dtype) -> Norm | None:
    """Return the norm with its weight in the order of the heads' reordered values, or None."""
    if norm is None:
        return None
    return Norm(norm, ops, dtype, norm_order(spec, norm.size))


def normalize(norm: Norm, heads: Tensor, context: ProductContext) -> None:
    """Normalise heads in place, [tokens, heads, head_dim]: each alone or all as one row, by the norm's size."""
    if norm.spec.part is not None:
        assert context.group is not None
        heads.copy_(norm.of_ranks(heads.flatten(1), context.group).view(heads.shape))
        return
    rows = heads if norm.spec.size == heads.shape[2] else heads.flatten(1)
    heads.copy_(norm(rows).view(heads.shape))
