"""A whole decoder built from its declaration, with the interface that runners use.

The residual stream is one tensor that layers add to in place. A layer returns that tensor, or another one if it ends
with a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from pagemill_execution.decoders.on_torch.blocks import (
    MLP,
    Attention,
    LayerBlock,
    LayerInputMLP,
)
from pagemill_execution.decoders.on_torch.context import ALONE, ForwardContext, ProductContext
from pagemill_execution.decoders.on_torch.encoder_attention import EncoderAttention
from pagemill_execution.decoders.on_torch.experts import MoE
from pagemill_execution.decoders.on_torch.latent_attention import LatentAttention
from pagemill_execution.decoders.on_torch.layers import Embedding, HasWeights, Layer, Linear, Norm, Table, VectorWeights
from pagemill_execution.decoders.on_torch.recurrent_blocks import (
    ChannelDeltaRule,
    DeltaRule,
    ShortConvolution,
    StateSpace,
)
from pagemill_kernels.registry import Ops
from pagemill_models.declaration.caches import (
    ChannelDeltaRuleSpec,
    DeltaRuleSpec,
    ShortConvolutionSpec,
    StateSpaceSpec,
)
from pagemill_models.declaration.declaration import (
    BlockSpec,
    BranchSpec,
    ClassifierSpec,
    DecoderSpec,
    DenseSpec,
    LatentAttentionSpec,
    LayerInputsSpec,
    LayerSpec,
    LinearSpec,
    MatrixSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    PositionsSpec,
    ResidualSpec,
    TokenTypesSpec,
)
from pagemill_models.sharding.linears import linears
from pagemill_models.spec.model_spec import ModelSpec


class LayerBuilder:
    """Builds layers from what they share: the device's operations, the order of caches, the rotary embeddings."""

    def __init__(self, spec: DecoderSpec, ops: Ops, dtype: torch.dtype) -> None:
        self._ops, self._dtype = ops, dtype
        self._rotations = spec.rotations()
        self._numbers = {(use.role == "embedding", use.spec.parts[0].name): use.number for use in linears(spec)}

    def block(self, spec: BlockSpec, layer: int) -> LayerBlock:
        number = self._number(next(iter(spec.linears())))
        if isinstance(spec, MoESpec):
            return MoE(spec, self._ops, self._dtype, number)
        if isinstance(spec, MLPSpec):
            return (MLP if spec.layer_input is None else LayerInputMLP)(spec, self._ops, self._dtype, number)
        if isinstance(spec, DeltaRuleSpec):
            return DeltaRule(spec, self._ops, self._dtype, number, layer)
        if isinstance(spec, ChannelDeltaRuleSpec):
            return ChannelDeltaRule(spec, self._ops, self._dtype, number, layer)
        if isinstance(spec, StateSpaceSpec):
            return StateSpace(spec, self._ops, self._dtype, number, layer)
        if isinstance(spec, ShortConvolutionSpec):
            return ShortConvolution(spec, self._ops, self._dtype, number, layer)
        rotation = None if spec.rope is None else self._rotations.index((spec.rope, spec.rotary_table_dim))
        if isinstance(spec, LatentAttentionSpec):
            return LatentAttention(spec, self._ops, self._dtype, number, layer, rotation)
        if not spec.causal:
            return EncoderAttention(spec, self._ops, self._dtype, number, rotation)
        return Attention(spec, self._ops, self._dtype, number, layer, rotation)

    def norm(self, spec: NormSpec | None) -> Norm | None:
        return None if spec is None else Norm(spec, self._ops, self._dtype)

    def linear(self, spec: LinearSpec | None) -> Linear | None:
        return None if spec is None else Linear(spec, self._ops, self._dtype, self._number(spec))

    def embedding(self, spec: DecoderSpec) -> Embedding:
        entry, first_row = spec.embedding, None if spec.vocabulary is None else spec.vocabulary[0]
        table = LinearSpec(entry.size, (MatrixSpec(name=entry.name, rows=entry.num_rows),))
        return Embedding(table, self._ops, self._dtype, self._numbers[True, entry.name], first_row)

    def layer_inputs(self, spec: DecoderSpec) -> LayerInputs | None:
        found, first_row = spec.embedding.layer_inputs, None if spec.vocabulary is None else spec.vocabulary[0]
        if found is None:
            return None
        table = Embedding(found.table, self._ops, self._dtype, self._numbers[False, found.name], first_row)
        projection = Linear(found.projection, self._ops, self._dtype, self._number(found.projection))
        return LayerInputs(found, table, projection, Norm(found.norm, self._ops, self._dtype))

    def factor(self, name: str | None) -> VectorWeights | None:
        return None if name is None else VectorWeights(name, (1,), self._ops)

    def table(self, spec: PositionsSpec | TokenTypesSpec | None, size: int) -> Table | None:
        return None if spec is None else Table(spec.name, spec.num_rows, size, self._ops, self._dtype)

    def classifier(self, spec: ClassifierSpec | None) -> Classifier | None:
        return None if spec is None else Classifier([self._dense(layer) for layer in spec.layers], self._dtype)

    def _dense(self, spec: DenseSpec) -> _Dense:
        linear = Linear(spec.linear, self._ops, self._dtype, self._number(spec.linear))
        return _Dense(spec, linear, self._ops, self._dtype)

    def _number(self, spec: LinearSpec) -> int:
        return self._numbers[False, spec.parts[0].name]


class Branch:
    def __init__(self, spec: BranchSpec, builder: LayerBuilder, layer: int, shared: int | None) -> None:
        """Build the branch. `shared`: index of the earlier branch whose normalised input it shares."""
        self.block = builder.block(spec.block, layer)
        self.shared = shared
        self.norm = None if shared is not None else builder.norm(spec.norm)
        self.output_norm = builder.norm(spec.output_norm)
        self.scale = spec.scale
        self.adds = spec.output_norm is None and spec.scale == 1.0

    def layers(self) -> Iterator[Layer]:
        yield from (norm for norm in (self.norm, self.output_norm) if norm is not None)
        yield from self.block.layers()

    def add(self, hidden: Tensor, x: Tensor, context: ForwardContext) -> None:
        """Add the block's output for x to `hidden` in place."""
        if self.adds and context.group is None:
            self.block.output.add_to(hidden, self.block.inner(x, context), context)
        else:
            hidden.add_(self.whole(x, context, hidden.dtype), alpha=self.scale)

    def whole(self, x: Tensor, context: ForwardContext, dtype: torch.dtype) -> Tensor:
        """Return the normalised output of all ranks for x."""
        if context.group is None:
            out = self.block.output(self.block.inner(x, context), context).to(dtype)
        else:
            out = self.partial(x, context)
            context.group.all_reduce(out)
            out = out.to(dtype)
        return out if self.output_norm is None else self.output_norm(out)

    def partial(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return what this rank computes of the block's output, in float32."""
        return self.block.output(self.block.inner(x, context), context).float().contiguous()


class Residual:
    def __init__(self, spec: ResidualSpec, builder: LayerBuilder, layer: int) -> None:
        shared = (_same_norm_index(spec, index) for index in range(len(spec.branches)))
        self.branches = [Branch(each, builder, layer, own) for each, own in zip(spec.branches, shared, strict=True)]
        self.norm, self.sum_norm = builder.norm(spec.norm), builder.norm(spec.sum_norm)
        self.factor = builder.factor(spec.factor)

    def layers(self) -> Iterator[Layer]:
        for branch in self.branches:
            yield from branch.layers()
        yield from (each for each in (self.norm, self.sum_norm, self.factor) if each is not None)

    def __call__(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        inputs: list[Tensor] = []
        for branch in self.branches:
            if branch.shared is not None:
                inputs.append(inputs[branch.shared])
            elif branch.norm is not None:
                inputs.append(branch.norm(hidden))
            else:
                # A branch must not read what another one adds.
                inputs.append(hidden if len(self.branches) == 1 else hidden.clone())
        if self.sum_norm is not None:
            first, *others = (
                branch.whole(x, context, hidden.dtype) for branch, x in zip(self.branches, inputs, strict=True)
            )
            hidden.add_(self.sum_norm(sum(others, first)))
        elif context.group is not None and len(self.branches) > 1 and all(branch.adds for branch in self.branches):
            out = self._partial(inputs, context)
            context.group.all_reduce(out)
            hidden.add_(out.to(hidden.dtype))
        else:
            for branch, x in zip(self.branches, inputs, strict=True):
                branch.add(hidden, x, context)
        if self.factor is not None:
            hidden.mul_(self.factor.values.to(hidden.dtype))
        return hidden if self.norm is None else self.norm(hidden).to(hidden.dtype)

    def _partial(self, inputs: list[Tensor], context: ForwardContext) -> Tensor:
        """Return what this rank computes of the sum of all branches, so that ranks add it once."""
        first, *others = (branch.partial(x, context) for branch, x in zip(self.branches, inputs, strict=True))
        for other in others:
            first += other
        return first


class LayerInputs:
    """What layers read of a token beside its hidden state, computed of its embedding."""

    def __init__(self, spec: LayerInputsSpec, table: Embedding, projection: Linear, norm: Norm) -> None:
        self.table, self.projection, self.norm = table, projection, norm
        self._spec = spec

    def layers(self) -> Iterator[Layer]:
        yield from (self.table, self.projection, self.norm)

    def __call__(self, token_ids: Tensor, embedded: Tensor, context: ForwardContext) -> Tensor:
        """Return the inputs of all layers, [tokens, layers x size]. embedded: [tokens, hidden]."""
        projected = self.projection(embedded, context).to(embedded.dtype)
        normed = self.norm(projected.view(-1, self._spec.norm.size)).view(projected.shape)
        inputs: Tensor = (normed + self.table(token_ids, context) * self._spec.scale) * 0.5**0.5
        return inputs


class DecoderLayer:
    def __init__(self, spec: LayerSpec, builder: LayerBuilder, number: int) -> None:
        self.spec = spec
        self.residuals = [Residual(residual, builder, number) for residual in spec.residuals]

    def layers(self) -> Iterator[Layer]:
        for residual in self.residuals:
            yield from residual.layers()

    def blocks(self) -> list[LayerBlock]:
        return [branch.block for residual in self.residuals for branch in residual.branches]

    def __call__(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        for residual in self.residuals:
            hidden = residual(hidden, context)
        return hidden


class Model(Protocol):
    """The model interface of torch runners."""

    spec: ModelSpec
    dtype: torch.dtype
    """Type of the values between matmuls."""

    @property
    def classifier(self) -> Callable[[Tensor], Tensor] | None: ...

    def weight_layers(self) -> Iterator[HasWeights]:
        """Yield all layers with weights."""
        ...

    def __call__(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Compute normalised hidden states, [tokens, hidden]. token_ids: int64 [tokens]."""
        ...

    def compute_logits(self, hidden: Tensor, context: ProductContext = ALONE) -> Tensor:
        """Compute logits, float32 [rows, vocab]. hidden: [rows, hidden]; the context's rows are the same."""
        ...


class Decoder:
    def __init__(self, spec: ModelSpec, ops: Ops, dtype: torch.dtype) -> None:
        """Build the decoder; weights are loaded later. `dtype`: type of the values between matmuls."""
        self.spec = spec
        self.dtype = dtype
        declared = spec.decoder
        entry, head = declared.embedding, declared.head
        self._entry = entry
        self._first_position = 0 if entry.positions is None else entry.positions.offset
        self._scale, self._soft_cap = (1.0, None) if head is None else (head.scale, head.soft_cap)
        builder = LayerBuilder(declared, ops, dtype)
        self.embedding = builder.embedding(declared) if declared.embeds else None
        """None, like the parts around it, in a later stage of a pipeline."""
        size, around = declared.hidden_size, entry if declared.embeds else None
        self.embedding_projection = None if around is None else builder.linear(around.projection)
        self.positions = None if around is None else builder.table(around.positions, size)
        self.token_types = None if around is None else builder.table(around.token_types, size)
        self.embedding_norm = None if around is None else builder.norm(around.norm)
        self.layer_inputs = None if around is None else builder.layer_inputs(declared)
        self.layers = [DecoderLayer(layer, builder, number) for number, layer in enumerate(declared.layers)]
        self.norm = builder.norm(declared.norm)
        self.head_projection = None if head is None else builder.linear(head.projection)
        self.lm_head = builder.linear(declared.head_linear())
        """The output head; None if hidden states are pooled."""
        self.classifier = builder.classifier(declared.classifier)
        self.keeps_before: frozenset[int] = frozenset()
        """Layers before which `kept` has the hidden states of the last step."""
        self.kept: list[Tensor] = []

    def weight_layers(self) -> Iterator[Layer]:
        """Yield all layers with weights, the embedding first and the head last."""
        before = (self.embedding, self.embedding_projection, self.positions, self.token_types, self.embedding_norm)
        yield from (layer for layer in (*before, self.norm, self.head_projection) if layer is not None)
        if self.layer_inputs is not None:
            yield from self.layer_inputs.layers()
        for layer in self.layers:
            yield from layer.layers()
        if self.classifier is not None:
            yield from self.classifier.layers()
        if self.lm_head is not None:
            yield self.lm_head

    def __call__(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Compute normalised hidden states, [tokens, hidden]. token_ids: int64 [tokens]."""
        return self.forward_layers(self.layers, token_ids, context)

    def forward_layers(self, layers: Iterable[DecoderLayer], token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Compute hidden states as a call does, but only with these layers."""
        hidden = self.embed(token_ids, context)
        if self.layer_inputs is not None:
            context = replace(context, layer_inputs=self.layer_inputs(token_ids, hidden, context))
        self.kept = []
        for number, layer in enumerate(layers):
            if number in self.keeps_before:
                self.kept.append(hidden.clone())
            hidden = layer(hidden, context)
        return hidden if self.norm is None else self.norm(hidden)

    def compute_logits(self, hidden: Tensor, context: ProductContext = ALONE) -> Tensor:
        """Compute logits, float32 [rows, vocab]. hidden: [rows, hidden]; the context's rows are the same."""
        return self.raw_logits(hidden, context).float()

    def raw_logits(self, hidden: Tensor, context: ProductContext = ALONE) -> Tensor:
        """Compute logits in the type of the head's matmul."""
        assert self.lm_head is not None, "requests for tokens of a model without a head are refused"
        hidden = hidden if self.head_projection is None else self.head_projection(hidden, context)
        logits, scale, cap = self.lm_head(hidden, context), self._scale, self._soft_cap
        if context.group is not None:
            logits = torch.cat(context.group.gather(logits.float().contiguous()), dim=1)
        if scale != 1.0:
            logits = logits.float().mul_(scale)
        return logits if cap is None else logits.float().div_(cap).tanh_().mul_(cap)

    def embed(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        if self.embedding is None:
            assert context.hidden is not None
            return context.hidden.clone()
        hidden = self.embedding(token_ids, context)
        if self._entry.scale != 1.0:
            hidden = hidden * self._entry.scale
        if self.embedding_projection is not None:
            hidden = self.embedding_projection(hidden, context).to(self.dtype)
        if self.positions is not None:
            hidden = hidden + self.positions(context.positions + self._first_position)
        if self.token_types is not None:
            assert context.token_types is not None
            hidden = hidden + self.token_types(context.token_types)
        return hidden if self.embedding_norm is None else self.embedding_norm(hidden).to(self.dtype)


def _same_norm_index(spec: ResidualSpec, index: int) -> int | None:
    """Return the index of the earlier branch with the same norm, or None."""
    norm = spec.branches[index].norm
    earlier = [branch.norm for branch in spec.branches[:index]]
    return earlier.index(norm) if norm is not None and norm in earlier else None


class _Dense:
    def __init__(self, spec: DenseSpec, linear: Linear, ops: Ops, dtype: torch.dtype) -> None:
        self.linear = linear
        self.norm = None if spec.norm is None else Norm(spec.norm, ops, dtype)
        self._activate = _activation(spec, ops)

    def layers(self) -> Iterator[Layer]:
        yield self.linear
        if self.norm is not None:
            yield self.norm

    def __call__(self, x: Tensor) -> Tensor:
        x = self._activate(self.linear(x, ALONE))
        return x if self.norm is None else self.norm(x)


class Classifier:
    """Classifies the pooled hidden state of each prompt: matmuls with activations and norms between them."""

    def __init__(self, dense: list[_Dense], dtype: torch.dtype) -> None:
        self._dtype, self._dense = dtype, dense

    def layers(self) -> Iterator[Layer]:
        for dense in self._dense:
            yield from dense.layers()

    def __call__(self, pooled: Tensor) -> Tensor:
        """Classify prompts. pooled: [prompts, hidden]. Returns float32 [prompts, labels]."""
        x = pooled.to(self._dtype)
        for dense in self._dense:
            x = dense(x).to(self._dtype)
        return x.float()


def _activation(spec: DenseSpec, ops: Ops) -> Callable[[Tensor], Tensor]:
    kind = spec.activation
    if kind is None:
        return lambda x: x
    if kind == "tanh":
        return torch.tanh
    return lambda x: ops.activate(x, kind)
