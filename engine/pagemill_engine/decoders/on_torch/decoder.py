"""A whole decoder built from its declaration, with the interface that runners use.

The residual stream is one tensor that layers add to in place. A layer returns that tensor, or another one if it ends
with a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from pagemill_engine.decoders.on_torch.blocks import MLP, Attention, LayerBlock
from pagemill_engine.decoders.on_torch.context import ForwardContext
from pagemill_engine.decoders.on_torch.encoder_attention import EncoderAttention
from pagemill_engine.decoders.on_torch.experts import MoE
from pagemill_engine.decoders.on_torch.latent_attention import LatentAttention
from pagemill_engine.decoders.on_torch.layers import Embedding, HasWeights, Layer, Linear, Norm, Table
from pagemill_kernels.registry import Ops
from pagemill_models.declaration.declaration import (
    BlockSpec,
    BranchSpec,
    ClassifierSpec,
    DecoderSpec,
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    LinearSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    PositionsSpec,
    ResidualSpec,
    RopeSpec,
    TokenTypesSpec,
)
from pagemill_models.spec.model_spec import ModelSpec


class _Builder:
    """Builds layers from what they share: the device's operations, the order of caches, the rotary embeddings."""

    def __init__(self, spec: DecoderSpec, ops: Ops, dtype: torch.dtype) -> None:
        self._ops, self._dtype = ops, dtype
        self._ropes: list[RopeSpec] = spec.ropes()
        self._caches = count()

    def block(self, spec: BlockSpec) -> LayerBlock:
        if isinstance(spec, MoESpec):
            return MoE(spec, self._ops, self._dtype)
        if isinstance(spec, MLPSpec):
            return MLP(spec, self._ops, self._dtype)
        rotation = None if spec.rope is None else self._ropes.index(spec.rope)
        if isinstance(spec, LatentAttentionSpec):
            assert rotation is not None
            return LatentAttention(spec, self._ops, self._dtype, next(self._caches), rotation)
        if not spec.causal:
            return EncoderAttention(spec, self._ops, self._dtype, rotation)
        return Attention(spec, self._ops, self._dtype, next(self._caches), rotation)

    def norm(self, spec: NormSpec | None) -> Norm | None:
        return None if spec is None else Norm(spec, self._ops, self._dtype)

    def linear(self, spec: LinearSpec | None) -> Linear | None:
        return None if spec is None else Linear(spec, self._ops, self._dtype)

    def table(self, spec: PositionsSpec | TokenTypesSpec | None, size: int) -> Table | None:
        return None if spec is None else Table(spec.name, spec.num_rows, size, self._ops, self._dtype)

    def classifier(self, spec: ClassifierSpec | None) -> Classifier | None:
        return None if spec is None else Classifier(spec, self._ops, self._dtype)


class Branch:
    def __init__(self, spec: BranchSpec, builder: _Builder, shared: int | None) -> None:
        """Build the branch. `shared`: index of the earlier branch whose normalised input it shares."""
        self.block = builder.block(spec.block)
        self.shared = shared
        self.norm = None if shared is not None else builder.norm(spec.norm)
        self.output_norm = builder.norm(spec.output_norm)
        self.scale = spec.scale
        self._adds = spec.output_norm is None and spec.scale == 1.0

    def layers(self) -> Iterator[Layer]:
        yield from (norm for norm in (self.norm, self.output_norm) if norm is not None)
        yield from self.block.layers()

    def add(self, hidden: Tensor, x: Tensor, context: ForwardContext) -> None:
        """Add the block's output for x to `hidden` in place."""
        inner = self.block.inner(x, context)
        if self._adds:
            self.block.output.add_to(hidden, inner)
            return
        out = self.block.output(inner).to(hidden.dtype)
        out = out if self.output_norm is None else self.output_norm(out)
        hidden.add_(out, alpha=self.scale)


class Residual:
    def __init__(self, spec: ResidualSpec, builder: _Builder) -> None:
        self.branches = [Branch(branch, builder, _same_norm_index(spec, i)) for i, branch in enumerate(spec.branches)]
        self.norm = builder.norm(spec.norm)

    def layers(self) -> Iterator[Layer]:
        for branch in self.branches:
            yield from branch.layers()
        if self.norm is not None:
            yield self.norm

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
        for branch, x in zip(self.branches, inputs, strict=True):
            branch.add(hidden, x, context)
        return hidden if self.norm is None else self.norm(hidden).to(hidden.dtype)


class DecoderLayer:
    def __init__(self, spec: LayerSpec, builder: _Builder) -> None:
        self.spec = spec
        self.residuals = [Residual(residual, builder) for residual in spec.residuals]

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

    def weight_layers(self) -> Iterator[HasWeights]:
        """Yield all layers with weights."""
        ...

    def __call__(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Compute normalised hidden states, [tokens, hidden]. token_ids: int64 [tokens]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits, float32 [rows, vocab]. hidden: [rows, hidden]."""
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
        builder = _Builder(declared, ops, dtype)
        self.embedding = Embedding(entry.name, entry.num_rows, entry.size, ops, dtype)
        self.embedding_projection = builder.linear(entry.projection)
        self.positions = builder.table(entry.positions, declared.hidden_size)
        self.token_types = builder.table(entry.token_types, declared.hidden_size)
        self.embedding_norm = builder.norm(entry.norm)
        self.layers = [DecoderLayer(layer, builder) for layer in declared.layers]
        self.norm = builder.norm(declared.norm)
        self.head_projection = None if head is None else builder.linear(head.projection)
        self.lm_head = builder.linear(declared.head_linear())
        """The output head; None if hidden states are pooled."""
        self.classifier = builder.classifier(declared.classifier)

    def weight_layers(self) -> Iterator[Layer]:
        """Yield all layers with weights, the embedding first and the head last."""
        yield self.embedding
        before = (self.embedding_projection, self.positions, self.token_types, self.embedding_norm)
        yield from (layer for layer in (*before, self.norm, self.head_projection) if layer is not None)
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
        hidden = self._embed(token_ids, context)
        for layer in layers:
            hidden = layer(hidden, context)
        return hidden if self.norm is None else self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits, float32 [rows, vocab]. hidden: [rows, hidden]."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits in the type of the head's matmul."""
        assert self.lm_head is not None, "requests for tokens of a model without a head are refused"
        hidden = hidden if self.head_projection is None else self.head_projection(hidden)
        logits, scale, cap = self.lm_head(hidden), self._scale, self._soft_cap
        if scale != 1.0:
            logits = logits.float().mul_(scale)
        return logits if cap is None else logits.float().div_(cap).tanh_().mul_(cap)

    def _embed(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        hidden = self.embedding(token_ids)
        if self._entry.scale != 1.0:
            hidden = hidden * self._entry.scale
        if self.embedding_projection is not None:
            hidden = self.embedding_projection(hidden).to(self.dtype)
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
    def __init__(self, spec: DenseSpec, ops: Ops, dtype: torch.dtype) -> None:
        self.linear = Linear(spec.linear, ops, dtype)
        self.norm = None if spec.norm is None else Norm(spec.norm, ops, dtype)
        self._activate = _activation(spec, ops)

    def layers(self) -> Iterator[Layer]:
        yield self.linear
        if self.norm is not None:
            yield self.norm

    def __call__(self, x: Tensor) -> Tensor:
        x = self._activate(self.linear(x))
        return x if self.norm is None else self.norm(x)


class Classifier:
    """Classifies the pooled hidden state of each prompt: matmuls with activations and norms between them."""

    def __init__(self, spec: ClassifierSpec, ops: Ops, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._dense = [_Dense(layer, ops, dtype) for layer in spec.layers]

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
