"""BLOOM (arXiv 2211.05100): ALiBi in place of positions, a norm after the embedding."""

from __future__ import annotations

from pagemill_models.declaration.changes import with_stacked_rows
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import AttentionSpec, DecoderSpec, EmbeddingSpec, HeadSpec, LayerSpec
from pagemill_models.declaration.family import Family, GGUFNames
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import HEAD, GGUFValues
from pagemill_models.declaration.parts import (
    alibi_slopes,
    head_size,
    layer_norm,
    linear,
    plain_mlp,
    query_key_value_by_head,
    sequential,
)


def read_config(config: ConfigValues) -> DecoderSpec:
    if config.flag("apply_residual_connection_post_layernorm", False):
        raise config.unsupported("residuals after its norms")
    size = config.size("hidden_size", "hidden_size", "n_embed", default=64)
    vocab_size, eps = config.size("vocab_size", default=250_880), config.epsilon("layer_norm_epsilon", default=1e-5)
    num_layers = config.size("num_layers", "n_layer", "num_hidden_layers", default=2)
    num_heads = config.size("num_heads", "n_head", "num_attention_heads", default=8)
    return DecoderSpec(
        architecture=config.architecture,
        hidden_size=size,
        vocab_size=vocab_size,
        max_position_embeddings=config.size("max_position_embeddings", "seq_length", default=2048),
        embedding=EmbeddingSpec(
            name="transformer.word_embeddings",
            num_rows=vocab_size,
            size=size,
            norm=layer_norm("transformer.word_embeddings_layernorm", size, eps),
        ),
        layers=tuple(_layer(f"transformer.h.{index}", size, num_heads, eps) for index in range(num_layers)),
        norm=layer_norm("transformer.ln_f", size, eps),
        head=HeadSpec(name="lm_head", tied=config.flag("tie_word_embeddings", True)),
        optional_prefix="transformer.",
    )


def _layer(name: str, size: int, num_heads: int, eps: float) -> LayerSpec:
    head_dim = head_size(size, num_heads)
    by_head = query_key_value_by_head(num_heads, head_dim)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        qkv=linear(size, (f"{name}.self_attention.query_key_value", 3 * size), bias=True, groups=by_head),
        output=linear(size, (f"{name}.self_attention.dense", size), bias=True),
        scale=head_dim**-0.5,
        alibi_slopes=alibi_slopes(num_heads),
    )
    mlp = plain_mlp(
        linear(size, (f"{name}.mlp.dense_h_to_4h", 4 * size), bias=True),
        linear(4 * size, (f"{name}.mlp.dense_4h_to_h", size), bias=True),
        "gelu_tanh",
    )
    norms = [layer_norm(f"{name}.{which}_layernorm", size, eps) for which in ("input", "post_attention")]
    return sequential(name, (norms[0], attention), (norms[1], mlp))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return with_stacked_rows(read_config(GGUFConfig(values, seq_length=values.integer("context_length"))))


_NAMES = GGUFNames(
    layers="transformer.h",
    in_layer={
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    outside_layers={
        "token_embd.weight": "transformer.word_embeddings.weight",
        "token_embd_norm.weight": "transformer.word_embeddings_layernorm.weight",
        "token_embd_norm.bias": "transformer.word_embeddings_layernorm.bias",
        "output_norm.weight": "transformer.ln_f.weight",
        "output_norm.bias": "transformer.ln_f.bias",
        HEAD: "lm_head.weight",
    },
    interleaved={},
)
FAMILY = Family(read_config, read_gguf, _NAMES)
