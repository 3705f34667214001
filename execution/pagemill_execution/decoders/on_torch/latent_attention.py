"""Attention over a cache of latents (MLA).

The matrix that maps latents to keys and values is multiplied into queries and outputs, so that a step reads one vector
per token and never computes keys or values of the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from pagemill_execution.decoders.on_torch.blocks import growth
from pagemill_execution.decoders.on_torch.context import ForwardContext, ProductContext
from pagemill_execution.decoders.on_torch.layers import Layer, Linear, Norm
from pagemill_execution.decoders.row_order import latent_order, latent_query_order
from pagemill_execution.decoders.tensors import TensorSource, read_stacked
from pagemill_kernels.registry import Ops
from pagemill_kernels.torch_arrays import float_type_of, to_torch
from pagemill_models.declaration.declaration import LatentAttentionSpec, Shapes


class _HeadMatrices:
    """The matrices from a latent to each head's key and value."""

    weight: Tensor
    """[heads, key_dim + value_dim, latent_size]."""

    def __init__(self, spec: LatentAttentionSpec, ops: Ops, dtype: torch.dtype, number: int) -> None:
        self._spec, self._ops, self._dtype, self._number = spec, ops, dtype, number

    def shapes(self) -> Shapes:
        return self._spec.up.shapes()

    def load(self, source: TensorSource) -> None:
        stacked = to_torch(read_stacked(source, self._spec.up.weight_shapes(), float_type_of(self._dtype)))
        self.weight = stacked.view(self._spec.num_heads, -1, self._spec.latent_size).to(self._ops.device)

    def held(self) -> Tensor:
        return self.weight

    def to_latents(self, queries: Tensor, context: ProductContext) -> Tensor:
        """Map queries to latents with the same scores.

        queries: [tokens, heads, key_dim]. Returns [tokens, heads, latent_size].
        """
        latents = torch.einsum("thk,hkl->thl", queries, self.weight[:, : self._spec.key_dim])
        for rows, (a, b) in self._adapters(context):
            shrunk = torch.einsum("thk,hkr->thr", queries[rows].float(), b[:, : self._spec.key_dim])
            latents.index_add_(0, rows, (shrunk @ a).to(latents.dtype))
        return latents

    def to_values(self, latents: Tensor, context: ProductContext) -> Tensor:
        """Map latents, [tokens, heads, latent_size], to values, [tokens, heads, value_dim]."""
        values = torch.einsum("thl,hvl->thv", latents, self.weight[:, self._spec.key_dim :])
        for rows, (a, b) in self._adapters(context):
            shrunk = latents[rows].float() @ a.T
            delta = torch.einsum("thr,hvr->thv", shrunk, b[:, self._spec.key_dim :])
            values.index_add_(0, rows, delta.to(values.dtype))
        return values

    def _adapters(self, context: ProductContext) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        """Yield rows and A and B of their adapter; B by heads, as `weight` is."""
        if context.adapters is not None:
            for rows, matrices in context.adapters.matrices(self._number):
                by_head = matrices.b.float().view(self._spec.num_heads, -1, matrices.b.shape[1])
                yield rows, (matrices.a.float(), by_head)


class LatentAttention:
    def __init__(
        self, spec: LatentAttentionSpec, ops: Ops, dtype: torch.dtype, number: int, index: int, rotation: int | None
    ) -> None:
        """Build the layer.

        `number`: that of its first linear layer. `index`: the layer's, that of its cache. `rotation`: index of
        its rotary embedding among the model's; None: it has none.
        """
        numbers = count(number)
        self.spec, self.ops, self.dtype = spec, ops, dtype
        self._index, self._rotation = index, rotation
        self.query_down = None if spec.query_down is None else Linear(spec.query_down, ops, dtype, next(numbers))
        self.query_norm = None if spec.query_norm is None else Norm(spec.query_norm, ops, dtype)
        self.query = Linear(spec.query, ops, dtype, next(numbers), latent_query_order(spec))
        self.down = Linear(spec.down, ops, dtype, next(numbers), latent_order(spec))
        self.latent_norm = Norm(spec.latent_norm, ops, dtype)
        self.up = _HeadMatrices(spec, ops, dtype, next(numbers))
        self.output = Linear(spec.output, ops, dtype, next(numbers))

    def layers(self) -> Iterator[Layer]:
        yield from (each for each in (self.query_down, self.query_norm) if each is not None)
        yield from (self.query, self.down, self.latent_norm, self.up, self.output)

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        spec, ops = self.spec, self.ops
        rotation = None if self._rotation is None else context.rotations[self._rotation]
        down = self.down(x, context).to(self.dtype)
        compressed, shared_key = torch.split(down, [spec.latent_size, spec.shared_size], -1)
        latents = self.latent_norm(compressed.contiguous()).to(self.dtype)
        if rotation is not None:
            ops.rotate(shared_key[:, None], *rotation)
        cache = context.vectors(self._index)
        # The whole step's latents are stored first, so that a prefix hit within the step reads them.
        ops.store_latents(torch.cat([latents, shared_key], -1), cache, context.kv_slots[self.spec.window])
        queries = self._queries(x, context)
        if spec.query_growth is not None:
            queries = queries * growth(spec.query_growth, context.positions).to(self.dtype)
        plain, turning = torch.split(queries, [spec.key_dim, spec.shared_size], -1)
        if rotation is not None:
            ops.rotate(turning, *rotation)
        query = torch.cat([self.up.to_latents(plain, context), turning], -1)
        attended = ops.paged_attention(query, cache, context.attention_plans[spec.window], spec.scale)
        return self.up.to_values(attended[..., : spec.latent_size], context).flatten(1)

    def _queries(self, x: Tensor, context: ProductContext) -> Tensor:
        """Return the queries, [tokens, heads, key_dim + shared_size]."""
        x = x if self.query_down is None else self.query_down(x, context)
        if self.query_norm is not None:
            x = self.query_norm(x.to(self.dtype))
        return self.query(x, context).to(self.dtype).view(len(x), self.spec.num_heads, -1)
