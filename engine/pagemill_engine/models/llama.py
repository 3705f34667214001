"""Llama (arXiv 2302.13971) and the shape of everything that descends from it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from pagemill_engine.models.blocks import Attention, CausalLM, Embedding, GatedMLP, RMSNorm
from pagemill_engine.models.context import ForwardContext
from pagemill_kernels.decoder_layer.parts import FusedLayer, LayerParts
from pagemill_kernels.registry import Ops
from pagemill_protocol.model_spec import ModelSpec


class LlamaDecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, ops: Ops, dtype: torch.dtype, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(ops, spec.hidden_size, spec.rms_norm_eps, dtype)
        self.self_attn = Attention(spec, ops, dtype, layer)
        self.post_attention_layernorm = RMSNorm(ops, spec.hidden_size, spec.rms_norm_eps, dtype)
        self.mlp = GatedMLP(spec, ops, dtype)
        self._fuse = ops.fuse_layer
        self._fused: FusedLayer | None = None

    def fuse(self) -> None:
        """With the weights loaded: one call for all that `forward` does, where the device has such."""
        if self._fuse is None:
            return
        attention, mlp = self.self_attn, self.mlp
        parts = LayerParts(
            attention_norm=self.input_layernorm.weight,
            qkv=attention.qkv_proj.packed,
            query_norm=attention.q_norm.weight if attention.has_qk_norm else None,
            key_norm=attention.k_norm.weight if attention.has_qk_norm else None,
            output=attention.o_proj.packed,
            mlp_norm=self.post_attention_layernorm.weight,
            gate_up=mlp.gate_up_proj.packed,
            down=mlp.down_proj.packed,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            eps=self.input_layernorm.eps,
            scale=attention.scale,
        )
        self._fused = self._fuse(parts)

    def forward(self, hidden: Tensor, context: ForwardContext) -> None:
        """Adds this layer's contribution to `hidden` in place."""
        if self._fused is not None:
            plan = context.attention_plans[self.self_attn.sliding_window]
            cache = context.kv_caches[self.self_attn.layer]
            self._fused(hidden, plan, context.cos, context.sin, cache, context.kv_slots)
            return
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
    model: LlamaModel

    def __init__(self, spec: ModelSpec, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(spec, ops, dtype)
        self.model = LlamaModel(spec, ops, dtype)

    def fuse(self) -> None:
        for layer in self.model.layers:
            cast(LlamaDecoderLayer, layer).fuse()
