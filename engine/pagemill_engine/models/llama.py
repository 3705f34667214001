"""Llama (arXiv 2302.13971) and the shape of everything that descends from it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagemill_engine.models.blocks import Attention, CausalLM, Embedding, GatedMLP, RMSNorm
from pagemill_engine.models.context import ForwardContext
from pagemill_kernels.registry import Ops
from pagemill_protocol.model_spec import ModelSpec


class LlamaDecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, ops: Ops, dtype: torch.dtype, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(ops, spec.hidden_size, spec.rms_norm_eps, dtype)
        self.self_attn = Attention(spec, ops, dtype, layer)
        self.post_attention_layernorm = RMSNorm(ops, spec.hidden_size, spec.rms_norm_eps, dtype)
        self.mlp = GatedMLP(spec, ops, dtype)

    def forward(self, hidden: Tensor, context: ForwardContext) -> None:
        """Adds this layer's contribution to `hidden` in place."""
        self.self_attn(self.input_layernorm(hidden), context, residual=hidden)
        self.mlp(self.post_attention_layernorm(hidden), residual=hidden)


class LlamaModel(nn.Module):
    def __init__(self, spec: ModelSpec, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(ops, spec.vocab_size, spec.hidden_size, dtype)
        self.layers = nn.ModuleList(LlamaDecoderLayer(spec, ops, dtype, layer) for layer in range(spec.num_layers))
        self.norm = RMSNorm(ops, spec.hidden_size, spec.rms_norm_eps, dtype)

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        hidden: Tensor = self.embed_tokens(token_ids)
        for layer in self.layers:
            layer(hidden, context)
        normed: Tensor = self.norm(hidden)
        return normed


class LlamaForCausalLM(CausalLM):
    def __init__(self, spec: ModelSpec, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(spec, ops, dtype)
        self.model = LlamaModel(spec, ops, dtype)
