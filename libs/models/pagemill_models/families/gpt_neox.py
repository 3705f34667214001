"""GPT-NeoX (arXiv 2204.06745), Pythia: partial rotary embedding, parallel attention and MLP, a norm for each."""

from __future__ import annotations

from pagemill_models.declaration.changes import with_stacked_rows
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    RopeSpec,
)
from pagemill_models.declaration.family import Family, GGUFNames
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import HEAD, GGUFValues
from pagemill_models.declaration.parts import (
    head_size,
    layer_norm,
    linear,
    parallel,
    plain_mlp,
    query_key_value_by_head,
    sequential,
)


def read_config(config: ConfigValues) -> DecoderSpec:
    size, num_heads = config.size("hidden_size"), config.size("num_heads", "num_attention_heads")
    vocab_size, eps = config.size("vocab_size"), config.epsilon("layer_norm_eps", default=1e-5)
    context = config.size("max_position_embeddings", default=2048)
    rope = config.rope(head_size(size, num_heads), context, partial=("rotary_pct", 0.25))
    num_layers = config.size("num_layers", "num_hidden_layers")
    return DecoderSpec(
        architecture=config.architecture,
        hidden_size=size,
        vocab_size=vocab_size,
        max_position_embeddings=context,
        embedding=EmbeddingSpec(name="gpt_neox.embed_in", num_rows=vocab_size, size=size),
        layers=tuple(_layer(config, index, size, num_heads, rope, eps) for index in range(num_layers)),
        norm=layer_norm("gpt_neox.final_layer_norm", size, eps),
        head=HeadSpec(name="embed_out", tied=config.flag("tie_word_embeddings", False)),
        ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    )


def _layer(config: ConfigValues, index: int, size: int, num_heads: int, rope: RopeSpec, eps: float) -> LayerSpec:
    name, head_dim, biased = f"gpt_neox.layers.{index}", head_size(size, num_heads), config.flag("attention_bias", True)
    inner = config.size("intermediate_size", default=4 * size)
    by_head = query_key_value_by_head(num_heads, head_dim)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        qkv=linear(size, (f"{name}.attention.query_key_value", 3 * size), bias=biased, groups=by_head),
        output=linear(size, (f"{name}.attention.dense", size), bias=biased),
        scale=head_dim**-0.5,
        rope=rope,
    )
    mlp = plain_mlp(
        linear(size, (f"{name}.mlp.dense_h_to_4h", inner), bias=True),
        linear(inner, (f"{name}.mlp.dense_4h_to_h", size), bias=True),
        config.activation("hidden_act", default="gelu"),
    )
    norms = [layer_norm(f"{name}.{which}_layernorm", size, eps) for which in ("input", "post_attention")]
    arrange = parallel if config.flag("use_parallel_residual", True) else sequential
    return arrange(name, (norms[0], attention), (norms[1], mlp))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    config = GGUFConfig(values, use_parallel_residual=values.flag("use_parallel_residual", True))
    return with_stacked_rows(read_config(config))


_NAMES = GGUFNames(
    layers="gpt_neox.layers",
    in_layer={
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    outside_layers={
        "token_embd.weight": "gpt_neox.embed_in.weight",
        "output_norm.weight": "gpt_neox.final_layer_norm.weight",
        "output_norm.bias": "gpt_neox.final_layer_norm.bias",
        HEAD: "embed_out.weight",
    },
    interleaved={},
)
FAMILY = Family(read_config, read_gguf, _NAMES)
