"""The blocks of a layer that keep a state: the delta rule in two forms, Mamba 2's state space, short convolutions.

`blocks` has attention and MLPs; the operations and their formulas are in `pagemill_kernels.recurrent`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill_execution.decoders.on_torch.context import ForwardContext
from pagemill_execution.decoders.on_torch.layers import Layer, Linear, Norm, Taps, VectorWeights
from pagemill_kernels.recurrent.reference import Convolution, DeltaHeads
from pagemill_kernels.recurrent.state_space import StateSpaceHeads
from pagemill_kernels.registry import Ops
from pagemill_models.declaration.caches import (
    ChannelDeltaRuleSpec,
    DeltaRuleSpec,
    ShortConvolutionSpec,
    StateSpaceSpec,
)


def decays(stored: VectorWeights) -> Tensor:
    """Return the factors of steps from their stored logarithms, correctly rounded: other arithmetic has the same."""
    return -stored.values.flatten().double().exp().float()


class DeltaRule:
    """The gated delta rule: products, a short convolution, the rule over the rows' states, a gated norm."""

    def __init__(self, spec: DeltaRuleSpec, ops: Ops, dtype: torch.dtype, number: int, layer: int) -> None:
        """Build the block. `number`: that of its first linear layer. `layer`: the layer's, that of its states."""
        self.spec, self.dtype = spec, dtype
        self._ops, self._layer = ops, layer
        heads = (spec.num_value_heads,)
        self.inputs = Linear(spec.inputs, ops, dtype, number)
        self.rates = Linear(spec.rates, ops, dtype, number + 1)
        self.output = Linear(spec.output, ops, dtype, number + 2)
        self.taps = Taps(spec.convolutions, spec.width, ops)
        self.decay = VectorWeights(f"{spec.name}.A_log", heads, ops)
        self.bias = VectorWeights(f"{spec.name}.dt_bias", heads, ops)
        self.norm = Norm(spec.norm, ops, dtype)

    def layers(self) -> Iterator[Layer]:
        yield from (self.inputs, self.rates, self.output, self.taps, self.decay, self.bias, self.norm)

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        spec, plan, cache = self.spec, context.states, context.state(self._layer)
        mixed, gate = torch.split(self.inputs(x, context), [spec.channels, spec.num_value_heads * spec.value_dim], -1)
        mixed = self._ops.causal_convolution(mixed, Convolution(self.taps.values), cache.windows, cache.inputs, plan)
        heads = DeltaHeads(
            decays(self.decay), self.bias.values, self.norm.weight.float(), self.norm.eps, spec.rate_scale
        )
        rates = self.rates(x, context)
        out = self._ops.delta_rule(mixed, rates, gate, heads, cache.states, cache.log, plan)
        return out.to(self.dtype).view(len(x), -1)


class ChannelDeltaRule:
    """The delta rule with decays by channel: its decays and gates are two products each."""

    def __init__(self, spec: ChannelDeltaRuleSpec, ops: Ops, dtype: torch.dtype, number: int, layer: int) -> None:
        """Build the block. The arguments are those of `DeltaRule`."""
        self.spec, self.dtype = spec, dtype
        self._ops, self._layer = ops, layer
        products = [Linear(each, ops, dtype, number + index) for index, each in enumerate(spec.linears())]
        self.inputs, self.rates, self.decay_down, self.decay_up, self.gate_down, self.gate_up, self.output = products
        heads = spec.num_value_heads
        self.taps = Taps(spec.convolutions, spec.width, ops)
        self.decay = VectorWeights(f"{spec.decay_name}.A_log", (1, 1, heads, 1), ops)
        self.bias = VectorWeights(f"{spec.decay_name}.dt_bias", (heads * spec.key_dim,), ops)
        self.norm = Norm(spec.norm, ops, dtype)

    def layers(self) -> Iterator[Layer]:
        yield from (self.inputs, self.rates, self.decay_down, self.decay_up, self.gate_down, self.gate_up, self.output)
        yield from (self.taps, self.decay, self.bias, self.norm)

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        plan, cache = context.states, context.state(self._layer)
        mixed = self.inputs(x, context)
        mixed = self._ops.causal_convolution(mixed, Convolution(self.taps.values), cache.windows, cache.inputs, plan)
        heads = DeltaHeads(decays(self.decay), self.bias.values, self.norm.weight.float(), self.norm.eps)
        steps = self.decay_up(self.decay_down(x, context).to(self.dtype), context)
        gates = self.gate_up(self.gate_down(x, context).to(self.dtype), context)
        rates = self.rates(x, context)
        out = self._ops.channel_delta_rule(mixed, rates, steps, gates, heads, cache.states, cache.log, plan)
        return out.to(self.dtype).view(len(x), -1)


class StateSpace:
    """Mamba 2's state space: one product, a short convolution, the recurrence over the rows' states, a gated norm."""

    def __init__(self, spec: StateSpaceSpec, ops: Ops, dtype: torch.dtype, number: int, layer: int) -> None:
        """Build the block. The arguments are those of `DeltaRule`."""
        self.spec, self.dtype = spec, dtype
        self._ops, self._layer = ops, layer
        heads = (spec.num_value_heads,)
        self.inputs = Linear(spec.inputs, ops, dtype, number)
        self.output = Linear(spec.output, ops, dtype, number + 1)
        self.taps = Taps({f"{spec.name}.conv1d": spec.channels}, spec.width, ops)
        self.tap_bias = VectorWeights(f"{spec.name}.conv1d.bias", (spec.channels,), ops) if spec.bias else None
        self.decay = VectorWeights(f"{spec.name}.A_log", heads, ops)
        self.skip = VectorWeights(f"{spec.name}.D", heads, ops)
        self.bias = VectorWeights(f"{spec.name}.dt_bias", heads, ops)
        self.norm = None if spec.norm is None else Norm(spec.norm, ops, dtype)
        self._scales = None
        if spec.scales is not None:
            self._scales = torch.tensor(spec.scales).repeat_interleave(torch.tensor(spec.input_sizes))

    def layers(self) -> Iterator[Layer]:
        yield from (self.inputs, self.output, self.taps, self.decay, self.skip, self.bias)
        yield from (each for each in (self.tap_bias, self.norm) if each is not None)

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        spec, plan, cache = self.spec, context.states, context.state(self._layer)
        inputs = self.inputs(x, context)
        if self._scales is not None:
            inputs = inputs * self._scales
        of_heads = spec.num_value_heads * spec.head_dim
        gates, mixed, steps = torch.split(inputs, [of_heads, spec.channels, spec.num_value_heads], -1)
        kernel = Convolution(self.taps.values, None if self.tap_bias is None else self.tap_bias.values)
        mixed = self._ops.causal_convolution(mixed, kernel, cache.windows, cache.inputs, plan)
        if spec.norm_heads is None:
            out = self._ops.state_space(mixed, steps, gates, self._heads(self.norm), cache.states, cache.log, plan)
        else:
            out = self._ops.state_space(mixed, steps, None, self._heads(None), cache.states, cache.log, plan)
            out = self._normed_by_ranks(out, gates, *spec.norm_heads, context)
        return out.to(self.dtype).view(len(x), -1)

    def _normed_by_ranks(
        self, out: Tensor, gates: Tensor, first: int, num_heads: int, context: ForwardContext
    ) -> Tensor:
        """Gate and normalise outputs, [tokens, heads, head_dim], of parts with heads on other ranks.

        `first`: the first head here, of `num_heads` of all ranks.
        """
        spec, norm, group = self.spec, self.norm, context.group
        assert norm is not None
        assert group is not None
        gate = F.silu(gates.float().reshape(out.shape))
        out = out * gate if spec.gates_first else out
        part = torch.arange(first, first + spec.num_value_heads) * spec.norm_parts // num_heads
        squares = torch.zeros(len(out), spec.norm_parts).index_add_(1, part, out.square().sum(-1))
        group.all_reduce(squares)
        scale = torch.rsqrt(squares * (spec.norm_parts / (num_heads * spec.head_dim)) + norm.eps)
        out = out * scale[:, part, None] * norm.weight.float().view(spec.num_value_heads, spec.head_dim)
        return out if spec.gates_first else out * gate

    def _heads(self, norm: Norm | None) -> StateSpaceHeads:
        spec = self.spec
        return StateSpaceHeads(
            decays(self.decay),
            self.bias.values,
            self.skip.values,
            None if norm is None else norm.weight.float(),
            spec.num_value_heads * spec.head_dim // spec.norm_parts,
            0.0 if norm is None else norm.eps,
            spec.gates_first,
            spec.step_limits,
        )


class ShortConvolution:
    """A short convolution between two gates."""

    def __init__(self, spec: ShortConvolutionSpec, ops: Ops, dtype: torch.dtype, number: int, layer: int) -> None:
        """Build the block. The arguments are those of `DeltaRule`."""
        self.dtype = dtype
        self._ops, self._layer = ops, layer
        self.inputs = Linear(spec.inputs, ops, dtype, number)
        self.output = Linear(spec.output, ops, dtype, number + 1)
        self.taps = Taps({spec.name: spec.channels}, spec.width, ops)
        self.bias = VectorWeights(f"{spec.name}.bias", (spec.channels,), ops) if spec.bias else None

    def layers(self) -> Iterator[Layer]:
        yield from (each for each in (self.inputs, self.output, self.taps, self.bias) if each is not None)

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        cache = context.state(self._layer)
        before, behind, values = self.inputs(x, context).chunk(3, -1)
        kernel = Convolution(self.taps.values, None if self.bias is None else self.bias.values, activated=False)
        mixed = self._ops.causal_convolution(before * values, kernel, cache.windows, cache.inputs, context.states)
        return (behind * mixed).to(self.dtype)
