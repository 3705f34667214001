"""The layers of a head that drafts tokens from the hidden states of another model (`declaration.ReadsSpec`).

It reads pairs: the token at a position, and the hidden states of the one before. `runners.torch_head` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pagemill_execution.decoders.fitting import check_tensors
from pagemill_execution.decoders.on_torch.context import ALONE, ForwardContext, ProductContext
from pagemill_execution.decoders.on_torch.decoder import DecoderLayer, LayerBuilder
from pagemill_execution.decoders.on_torch.layers import Layer, Linear, Norm
from pagemill_execution.decoders.tensors import TensorSource
from pagemill_kernels.registry import Ops
from pagemill_models.spec.model_spec import ModelSpec

Embed = Callable[[Tensor, ForwardContext], Tensor]


class HeadLayers:
    """`decoder.Model`, with logits of the head's own vocabulary."""

    classifier: Callable[[Tensor], Tensor] | None = None

    def __init__(self, spec: ModelSpec, ops: Ops, dtype: torch.dtype, source: TensorSource, embed: Embed) -> None:
        """Build the head and load its weights. `embed`: the target's embedding. Raises `WeightsError`."""
        self.spec, self.dtype = spec, dtype
        declared = spec.decoder
        reads = declared.reads
        assert reads is not None
        check_tensors(declared.shapes(), source.shapes)
        builder = LayerBuilder(declared, ops, dtype)
        self.embedding = builder.embedding(declared) if declared.embeds else None
        self.embedding_norm = Norm(reads.embedding_norm, ops, dtype)
        self.hidden_norm = Norm(reads.hidden_norm, ops, dtype)
        self.states = None if reads.states is None else Linear(reads.states, ops, dtype, 0)
        """Makes one hidden state of those of the target's layers."""
        self.projection = None if reads.projection is None else Linear(reads.projection, ops, dtype, 0)
        self.layer = DecoderLayer(declared.layers[0], builder, 0)
        self.norm = builder.norm(declared.norm)
        self.lm_head = builder.linear(declared.head_linear())
        """None: the target's."""
        self._normed_residual = reads.normed_residual
        self._embed = embed if self.embedding is None else self.embedding
        for layer in self.weight_layers():
            layer.load(source)

    def weight_layers(self) -> Iterator[Layer]:
        parts = (self.embedding, self.embedding_norm, self.hidden_norm, self.states, self.projection)
        yield from (each for each in (*parts, self.norm, self.lm_head) if each is not None)
        yield from self.layer.layers()

    def __call__(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Return the hidden states that the next pairs read: of MTP normalised, of EAGLE-3 not. The context's hidden
        states are those of the tokens before."""
        assert context.hidden is not None
        embedded, before = self._embed(token_ids, context).to(self.dtype), context.hidden.to(self.dtype)
        normed = self.hidden_norm(before).to(self.dtype)
        x = torch.cat([self.embedding_norm(embedded).to(self.dtype), normed], -1)
        if self.projection is not None:
            hidden = self.layer(self.projection(x, ALONE).to(self.dtype), context)
            return hidden if self.norm is None else self.norm(hidden).to(self.dtype)
        hidden = (normed if self._normed_residual else before).clone()
        first, *others = self.layer.residuals
        first.branches[0].add(hidden, x, context)
        for residual in others:
            hidden = residual(hidden, context)
        return hidden

    def compute_logits(self, hidden: Tensor, context: ProductContext = ALONE) -> Tensor:
        assert self.lm_head is not None
        normed = hidden if self.norm is None else self.norm(hidden).to(self.dtype)
        return self.lm_head(normed, context).float()
