"""Attention over a cache of latents (MLA).

The matrix that maps latents to keys and values is multiplied into queries and outputs, so that a step reads one vector
per token and never computes keys or values of the context.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pagemill_engine.decoders.on_torch.context import ForwardContext
from pagemill_engine.decoders.on_torch.layers import Layer, Linear, Norm
from pagemill_engine.decoders.row_order import latent_order, latent_query_order
from pagemill_engine.decoders.tensors import TensorSource, read_stacked
from pagemill_kernels.registry import Ops
from pagemill_kernels.torch_arrays import float_type_of, to_torch
from pagemill_models.declaration.declaration import LatentAttentionSpec, Shapes


class _HeadMatrices:
    """The matrices from a latent to each head's key and value."""

    weight: Tensor
    """[heads, key_dim + value_dim, latent_size]."""

    def __init__(self, spec: LatentAttentionSpec, ops: Ops, dtype: torch.dtype) -> None:
        self._spec, self._ops, self._dtype = spec, ops, dtype

    def shapes(self) -> Shapes:
        return self._spec.up.shapes()

    def load(self, source: TensorSource) -> None:
        stacked = to_torch(read_stacked(source, self._spec.up.weight_shapes(), float_type_of(self._dtype)))
        self.weight = stacked.view(self._spec.num_heads, -1, self._spec.latent_size).to(self._ops.device)

    def held(self) -> Tensor:
        return self.weight

    def to_latents(self, queries: Tensor) -> Tensor:
        """Map queries to latents with the same scores.

        queries: [tokens, heads, key_dim]. Returns [tokens, heads, latent_size].
        """
        return torch.einsum("thk,hkl->thl", queries, self.weight[:, : self._spec.key_dim])

    def to_values(self, latents: Tensor) -> Tensor:
        """Map latents, [tokens, heads, latent_size], to values, [tokens, heads, value_dim]."""
        return torch.einsum("thl,hvl->thv", latents, self.weight[:, self._spec.key_dim :])


class LatentAttention:
    def __init__(self, spec: LatentAttentionSpec, ops: Ops, dtype: torch.dtype, index: int, rotation: int) -> None:
        """Build the layer. `index`: that of its cache. `rotation`: index of its rotary embedding among the model's."""
        self.spec, self.ops, self.dtype = spec, ops, dtype
        self._index, self._rotation = index, rotation
        self.query_down = None if spec.query_down is None else Linear(spec.query_down, ops, dtype)
        self.query_norm = None if spec.query_norm is None else Norm(spec.query_norm, ops, dtype)
        self.query = Linear(spec.query, ops, dtype, latent_query_order(spec))
        self.down = Linear(spec.down, ops, dtype, latent_order(spec))
        self.latent_norm = Norm(spec.latent_norm, ops, dtype)
        self.up = _HeadMatrices(spec, ops, dtype)
        self.output = Linear(spec.output, ops, dtype)

    def layers(self) -> Iterator[Layer]:
        yield from (each for each in (self.query_down, self.query_norm) if each is not None)
        yield from (self.query, self.down, self.latent_norm, self.up, self.output)

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        spec, ops = self.spec, self.ops
        cos, sin = context.rotations[self._rotation]
        compressed, shared_key = torch.split(self.down(x).to(self.dtype), [spec.latent_size, spec.rope.rotary_dim], -1)
        latents = self.latent_norm(compressed.contiguous()).to(self.dtype)
        ops.rotate(shared_key[:, None], cos, sin)
        cache = context.kv_caches[self._index]
        # The whole step's latents are stored first, so that a prefix hit within the step reads them.
        ops.store_latents(torch.cat([latents, shared_key], -1), cache, context.kv_slots)
        plain, turning = torch.split(self._queries(x), [spec.key_dim, spec.rope.rotary_dim], -1)
        ops.rotate(turning, cos, sin)
        query = torch.cat([self.up.to_latents(plain), turning], -1)
        attended = ops.paged_attention(query, cache, context.attention_plans[spec.window], spec.scale)
        return self.up.to_values(attended[..., : spec.latent_size]).flatten(1)

    def _queries(self, x: Tensor) -> Tensor:
        """Return the queries, [tokens, heads, key_dim + rotary_dim]."""
        x = x if self.query_down is None else self.query_down(x)
        if self.query_norm is not None:
            x = self.query_norm(x.to(self.dtype))
        return self.query(x).to(self.dtype).view(len(x), self.spec.num_heads, -1)
