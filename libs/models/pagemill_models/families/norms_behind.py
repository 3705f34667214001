"""Layers with norms behind their blocks, and norms over all queries and all keys at once, as OLMo 2 has them."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_attention
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    DecoderSpec,
    LayerSpec,
    NormSpec,
    ResidualSpec,
)
from pagemill_models.families.llama_like import Numbers


def with_norms_behind(plain: DecoderSpec, numbers: Numbers) -> DecoderSpec:
    """Return the decoder with norms behind its blocks in place of those before, and of all queries and keys."""
    behind = with_layer_norms_behind(plain, numbers)
    return with_attention(behind, lambda index, spec: whole_norms(spec, behind.layers[index], numbers))


def with_layer_norms_behind(plain: DecoderSpec, numbers: Numbers) -> DecoderSpec:
    return replace(
        plain, layers=tuple(layer_with_norms_behind(layer, tuple(layer.blocks()), numbers) for layer in plain.layers)
    )


def layer_with_norms_behind(plain: LayerSpec, blocks: tuple[BlockSpec, ...], numbers: Numbers) -> LayerSpec:
    """Return the layer with attention and MLP, `blocks`, each before a norm of its own."""
    behind = zip(("post_attention", "post_feedforward"), blocks, strict=True)
    branches = [
        BranchSpec(block=block, output_norm=_norm(f"{plain.name}.{name}_layernorm", numbers.hidden_size, numbers))
        for name, block in behind
    ]
    return LayerSpec(plain.name, tuple(ResidualSpec((branch,)) for branch in branches))


def whole_norms(plain: AttentionSpec, layer: LayerSpec, numbers: Numbers) -> AttentionSpec:
    """Return attention with one norm over all queries and one over all keys."""
    name, head_dim = f"{layer.name}.self_attn", plain.head_dim
    return replace(
        plain,
        query_norm=_norm(f"{name}.q_norm", plain.num_heads * head_dim, numbers),
        key_norm=_norm(f"{name}.k_norm", plain.num_kv_heads * head_dim, numbers),
    )


def _norm(name: str, size: int, numbers: Numbers) -> NormSpec:
    return NormSpec(name=name, size=size, eps=numbers.rms_norm_eps)
