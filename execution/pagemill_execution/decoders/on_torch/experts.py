"""A mixture of experts as a block of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from pagemill_execution.decoders.expert_parts import gate_of, gating_of
from pagemill_execution.decoders.on_torch.blocks import MLP
from pagemill_execution.decoders.on_torch.context import ForwardContext, ProductContext
from pagemill_execution.decoders.on_torch.layers import Layer, Linear, Norm, VectorWeights
from pagemill_execution.decoders.tensors import TensorSource
from pagemill_kernels.adapters.rows import ExpertRows
from pagemill_kernels.experts.parts import ExpertParts, FusedExperts
from pagemill_kernels.registry import Ops
from pagemill_models.declaration.declaration import MoESpec, Shapes, SharedExpertSpec


class Experts:
    """All experts of a layer, loaded one after another and packed together."""

    packed: FusedExperts

    def __init__(self, spec: MoESpec, ops: Ops, dtype: torch.dtype, number: int) -> None:
        """Build the experts. `number`: that of the first expert's first linear layer."""
        self._spec, self._ops, self._dtype, self._number = spec, ops, dtype, number

    def shapes(self) -> Shapes:
        return {name: shape for mlp in self._spec.experts for name, shape in mlp.shapes().items()}

    def load(self, source: TensorSource) -> None:
        parts = []
        numbers = count(self._number)
        for mlp in self._spec.experts:
            up, down = (Linear(each, self._ops, self._dtype, next(numbers)) for each in mlp.linears())
            up.load(source)
            down.load(source)
            parts.append(ExpertParts(up.packed, down.packed))
        self.packed = self._ops.pack_experts(parts, gate_of(self._spec))

    def held(self) -> FusedExperts:
        return self.packed

    def add_to(self, out: Tensor, x: Tensor, chosen: Tensor, weights: Tensor, context: ProductContext) -> None:
        rows = None if context.adapters is None else ExpertRows(context.adapters, self._number)
        self.packed.add_to(out, x, chosen, weights, rows)


class _SharedExpert:
    def __init__(self, spec: SharedExpertSpec, ops: Ops, dtype: torch.dtype, number: int) -> None:
        self.mlp = MLP(spec.mlp, ops, dtype, number)
        self.gate = None if spec.gate is None else Linear(spec.gate, ops, dtype, number + 2)
        self._add_gated = ops.add_gated

    def layers(self) -> Iterator[Layer]:
        yield from self.mlp.layers()
        if self.gate is not None:
            yield self.gate

    def add_to(self, out: Tensor, x: Tensor, context: ProductContext) -> None:
        inner = self.mlp.activate(x, context)
        if self.gate is None:
            self.mlp.output.add_to(out, inner, context)
        else:
            self._add_gated(out, self.mlp.output(inner, context), self.gate(x, context))


class MoE:
    """A mixture of experts. It is its own `output`, because it adds a sum over experts."""

    def __init__(self, spec: MoESpec, ops: Ops, dtype: torch.dtype, number: int) -> None:
        """Build the block. `number`: that of its router, whom the experts and the shared one follow."""
        self.router = Linear(spec.router, ops, dtype, number)
        self.experts = Experts(spec, ops, dtype, number + 1)
        behind = number + 1 + 2 * len(spec.experts)
        self.shared = None if spec.shared is None else _SharedExpert(spec.shared, ops, dtype, behind)
        last = behind + (0 if spec.shared is None else 2 + (spec.shared.gate is not None))
        self.before = None if spec.before is None else Linear(spec.before, ops, dtype, last)
        self.behind = None if spec.behind is None else Linear(spec.behind, ops, dtype, last + 1)
        self.spec = spec
        self._ops, self._dtype = ops, dtype
        bias = None if spec.gating is None else spec.gating.bias
        self.norm = None if spec.norm is None else Norm(spec.norm, ops, dtype)
        self.router_norm = None if spec.router_norm is None else Norm(spec.router_norm, ops, dtype)
        scales = spec.expert_scales
        self.scales = None if scales is None else VectorWeights(scales, (len(spec.experts),), ops)
        self.choice_bias = None if bias is None else VectorWeights(bias, (len(spec.experts),), ops)
        self.gating = gating_of(spec)

    @property
    def output(self) -> MoE:
        return self

    def layers(self) -> Iterator[Layer]:
        yield self.router
        yield self.experts
        others = (self.choice_bias, self.norm, self.router_norm, self.scales, self.before, self.behind)
        yield from (each for each in others if each is not None)
        if self.shared is not None:
            yield from self.shared.layers()

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        return x

    def __call__(self, x: Tensor, context: ProductContext) -> Tensor:
        out = torch.zeros(x.shape, dtype=self._dtype, device=x.device)
        self.add_to(out, x, context)
        return out

    def add_to(self, out: Tensor, x: Tensor, context: ProductContext) -> None:
        chosen, weights = self._route(self.router(x if self.router_norm is None else self.router_norm(x), context))
        if self.scales is not None:
            weights = weights * self.scales.values[chosen]
        x = x if self.norm is None else self.norm(x)
        if self.before is None or self.behind is None:
            self.experts.add_to(out, x, chosen, weights, context)
        else:
            read = self.before(x, context)
            found = torch.zeros_like(read, dtype=self._dtype)
            self.experts.add_to(found, read, chosen, weights, context)
            self.behind.add_to(out, found, context)
        if self.shared is not None:
            self.shared.add_to(out, x, context)

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        top_k, renormalized = self.spec.top_k, self.spec.renormalized
        if self.gating is None:
            return self._ops.route(logits, top_k, renormalized)
        bias = None if self.choice_bias is None else self.choice_bias.values
        return self._ops.route_by_groups(logits, top_k, renormalized, self.gating, bias)
