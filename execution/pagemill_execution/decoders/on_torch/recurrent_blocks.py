"""The blocks of a layer that keep a state: the delta rule in two forms, Mamba 2's state space, short convolutions.

`blocks` has attention and MLPs; the operations and their formulas are in `pagemill_kernels.recurrent`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill_execution.decoders.on_torch.context import ForwardContext, StateTensors
from pagemill_execution.decoders.on_torch.layers import Layer, Linear, Norm, Taps, VectorWeights
from pagemill_execution.decoders.tensors import TensorSource
from pagemill_kernels.recurrent.reference import Convolution, DeltaHeads
from pagemill_kernels.recurrent.state_space import StateSpaceHeads
from pagemill_kernels.registry import Ops
from pagemill_models.declaration.caches import (
    ChannelDeltaRuleSpec,
    DeltaRuleSpec,
    ShortConvolutionSpec,
    StateSpaceSpec,
)

Places = tuple[StateTensors, Any]
"""What a recurrent layer keeps, and the plan of the step's rows."""


class Decays(VectorWeights):
    """The factors of steps, from their stored logarithms; correctly rounded, as other arithmetic has the same."""

    def load(self, source: TensorSource) -> None:
        super().load(source)
        self.values = -self.values.flatten().double().exp().float()


def recur(ops: Ops, rule: str, x: Tensor, kernel: Convolution, others: tuple[Any, ...], context: Places) -> Tensor:
    """Return the outputs of a rule over convolved inputs, in one pass where the device has one. `others`: the
    arguments of its operation between its inputs and its states."""
    cache, plan = context
    if ops.convolved_rule is not None:
        return ops.convolved_rule(rule, x, kernel, others, (cache.states, cache.windows, cache.log, cache.inputs), plan)
    x = ops.causal_convolution(x, kernel, cache.windows, cache.inputs, plan)
    out: Tensor = getattr(ops, rule)(x, *others, cache.states, cache.log, plan)
    return out


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
        self.decay = Decays(f"{spec.name}.A_log", heads, ops)
        self.bias = VectorWeights(f"{spec.name}.dt_bias", heads, ops)
        self.norm = Norm(spec.norm, ops, torch.float32)

    def layers(self) -> Iterator[Layer]:
        yield from (self.inputs, self.rates, self.output, self.taps, self.decay, self.bias, self.norm)

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        spec = self.spec
        mixed, gate = torch.split(self.inputs(x, context), [spec.channels, spec.num_value_heads * spec.value_dim], -1)
        heads = DeltaHeads(self.decay.values, self.bias.values, self.norm.weight, self.norm.eps, spec.rate_scale)
        others, places = (self.rates(x, context), gate, heads), (context.state(self._layer), context.states)
        out = recur(self._ops, "delta_rule", mixed, Convolution(self.taps.values), others, places)
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
        self.decay = Decays(f"{spec.decay_name}.A_log", (1, 1, heads, 1), ops)
        self.bias = VectorWeights(f"{spec.decay_name}.dt_bias", (heads * spec.key_dim,), ops)
        self.norm = Norm(spec.norm, ops, torch.float32)

    def layers(self) -> Iterator[Layer]:
        yield from (self.inputs, self.rates, self.decay_down, self.decay_up, self.gate_down, self.gate_up, self.output)
        yield from (self.taps, self.decay, self.bias, self.norm)

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        mixed, kernel = self.inputs(x, context), Convolution(self.taps.values)
        heads = DeltaHeads(self.decay.values, self.bias.values, self.norm.weight, self.norm.eps)
        steps = self.decay_up(self.decay_down(x, context).to(self.dtype), context)
        gates = self.gate_up(self.gate_down(x, context).to(self.dtype), context)
        others, places = (self.rates(x, context), steps, gates, heads), (context.state(self._layer), context.states)
        out = recur(self._ops, "channel_delta_rule", mixed, kernel, others, places)
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
        self.decay = Decays(f"{spec.name}.A_log", heads, ops)
        self.skip = VectorWeights(f"{spec.name}.D", heads, ops)
        self.bias = VectorWeights(f"{spec.name}.dt_bias", heads, ops)
        self.norm = None if spec.norm is None else Norm(spec.norm, ops, torch.float32)
        self._scales = None
        if spec.scales is not None:
            self._scales = torch.tensor(spec.scales).repeat_interleave(torch.tensor(spec.input_sizes)).to(ops.device)

    def layers(self) -> Iterator[Layer]:
        yield from (self.inputs, self.output, self.taps, self.decay, self.skip, self.bias)
        yield from (each for each in (self.tap_bias, self.norm) if each is not None)

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        spec, places = self.spec, (context.state(self._layer), context.states)
        inputs = self.inputs(x, context)
        if self._scales is not None:
            inputs = inputs * self._scales
        of_heads = spec.num_value_heads * spec.head_dim
        gates, mixed, steps = torch.split(inputs, [of_heads, spec.channels, spec.num_value_heads], -1)
        kernel = Convolution(self.taps.values, None if self.tap_bias is None else self.tap_bias.values)
        if spec.norm_heads is None:
            out = recur(self._ops, "state_space", mixed, kernel, (steps, gates, self._heads(self.norm)), places)
        else:
            out = recur(self._ops, "state_space", mixed, kernel, (steps, None, self._heads(None)), places)
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
        part = torch.arange(first, first + spec.num_value_heads, device=out.device) * spec.norm_parts // num_heads
        squares = torch.zeros(len(out), spec.norm_parts, device=out.device).index_add_(1, part, out.square().sum(-1))
        group.all_reduce(squares)
        scale = torch.rsqrt(squares * (spec.norm_parts / (num_heads * spec.head_dim)) + norm.eps)
        out = out * scale[:, part, None] * norm.weight.view(spec.num_value_heads, spec.head_dim)
        return out if spec.gates_first else out * gate

    def _heads(self, norm: Norm | None) -> StateSpaceHeads:
        spec = self.spec
        return StateSpaceHeads(
            self.decay.values,
            self.bias.values,
            self.skip.values,
            None if norm is None else norm.weight,
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
