"""Falcon (arXiv 2311.16867): multi-query (7B), grouped queries and two norms (40B), or ALiBi and plain layers (RW)."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_norms, with_stacked_rows
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    NormSpec,
    RopeSpec,
    RowGroups,
)
from pagemill_models.declaration.family import Family, GGUFNames
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import HEAD, GGUFValues
from pagemill_models.declaration.parts import (
    alibi_slopes,
    head_size,
    layer_norm,
    linear,
    parallel,
    plain_mlp,
    query_key_value_by_head,
    sequential,
)


def read_config(config: ConfigValues) -> DecoderSpec:
    size, vocab_size = config.size("hidden_size", default=4544), config.size("vocab_size", default=65_024)
    num_heads = config.size("num_heads", "num_attention_heads", "n_head", default=71)
    context = config.size("max_position_embeddings", default=2048)
    rope = None if config.flag("alibi", False) else config.rope(head_size(size, num_heads), context)
    num_layers = config.size("num_layers", "num_hidden_layers", "n_layer", default=32)
    return DecoderSpec(
        architecture=config.architecture,
        hidden_size=size,
        vocab_size=vocab_size,
        max_position_embeddings=context,
        embedding=EmbeddingSpec(name="transformer.word_embeddings", num_rows=vocab_size, size=size),
        layers=tuple(_layer(config, f"transformer.h.{index}", size, num_heads, rope) for index in range(num_layers)),
        norm=layer_norm("transformer.ln_f", size, _eps(config)),
        head=HeadSpec(name="lm_head", tied=config.flag("tie_word_embeddings", True)),
    )


def _layer(config: ConfigValues, name: str, size: int, num_heads: int, rope: RopeSpec | None) -> LayerSpec:
    biased, inner = config.flag("bias", False), config.size("intermediate_size", "ffn_hidden_size", default=4 * size)
    mlp = plain_mlp(
        linear(size, (f"{name}.mlp.dense_h_to_4h", inner), bias=biased),
        linear(inner, (f"{name}.mlp.dense_4h_to_h", size), bias=biased),
        config.activation("activation", default="gelu"),
    )
    attention, norms = _attention(config, name, size, num_heads, rope), _norms(config, name, size)
    is_parallel = config.flag("new_decoder_architecture", False) or config.flag("parallel_attn", True)
    return (parallel if is_parallel else sequential)(name, (norms[0], attention), (norms[1], mlp))


def _attention(config: ConfigValues, name: str, size: int, num_heads: int, rope: RopeSpec | None) -> AttentionSpec:
    head_dim, biased = head_size(size, num_heads), config.flag("bias", False)
    num_kv_heads = num_heads
    groups: RowGroups | None = query_key_value_by_head(num_heads, head_dim)
    if config.flag("new_decoder_architecture", False):
        num_kv_heads = config.size("num_kv_heads", "num_kv_heads", "n_head_kv", default=num_heads)
        groups = RowGroups(num_kv_heads, (num_heads // num_kv_heads * head_dim, head_dim, head_dim))
    elif config.flag("multi_query", True):
        num_kv_heads, groups = 1, None
    rows = size + 2 * num_kv_heads * head_dim
    # Unlike BLOOM, it adds ALiBi before it scales the scores.
    slopes = alibi_slopes(num_heads, head_dim**-0.5) if rope is None else None
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv=linear(size, (f"{name}.self_attention.query_key_value", rows), bias=biased, groups=groups),
        output=linear(size, (f"{name}.self_attention.dense", size), bias=biased),
        scale=head_dim**-0.5,
        rope=rope,
        alibi_slopes=slopes,
    )


def _norms(config: ConfigValues, name: str, size: int) -> list[NormSpec]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if config.flag("new_decoder_architecture", False):
        num_norms = config.optional_integer("num_ln_in_parallel_attn", 2)
        names = ["input_layernorm"] * 2 if num_norms == 1 else ["ln_attn", "ln_mlp"]
    elif config.flag("parallel_attn", True):
        names = ["input_layernorm"] * 2
    return [layer_norm(f"{name}.{each}", size, _eps(config)) for each in names]


def _eps(config: ConfigValues) -> float:
    return config.epsilon("layer_norm_epsilon", default=1e-5)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    """Declare a GGUF file's decoder: 7B, 40B or 11B. RW is refused, since GGUF has no keys for its settings."""
    if values.has("blk.0.attn_qkv.bias"):
        raise values.unsupported("biases (Falcon-RW)")
    num_kv_heads, two_norms = values.integer("attention.head_count_kv", 1), values.has("blk.0.attn_norm_2.weight")
    config = GGUFConfig(
        values,
        num_kv_heads=num_kv_heads,
        new_decoder_architecture=two_norms or num_kv_heads > 1,
        num_ln_in_parallel_attn=2 if two_norms else 1,
    )
    plain = with_stacked_rows(read_config(config))
    return with_norms(plain, lambda norm: replace(norm, name=norm.name.replace(".ln_mlp", ".input_layernorm")))


_NAMES = GGUFNames(
    layers="transformer.h",
    in_layer={
        "attn_norm": "input_layernorm",
        "attn_norm_2": "ln_attn",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    outside_layers={
        "token_embd.weight": "transformer.word_embeddings.weight",
        "output_norm.weight": "transformer.ln_f.weight",
        "output_norm.bias": "transformer.ln_f.bias",
        HEAD: "lm_head.weight",
    },
    interleaved={},
)
FAMILY = Family(read_config, read_gguf, _NAMES)
