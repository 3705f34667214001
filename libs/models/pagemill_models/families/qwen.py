"""Qwen (arXiv 2309.16609), the first version: Llama with other names, and biases on queries, keys and values.

Its dynamic rotary embedding and logit scaling beyond `seq_length` are not needed: no context is longer.
"""

from __future__ import annotations

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RopeSpec,
)
from pagemill_models.declaration.family import Family, GGUFNames
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import HEAD, GGUFValues
from pagemill_models.declaration.parts import head_size, linear, sequential


def read_config(config: ConfigValues) -> DecoderSpec:
    size, vocab_size = config.size("hidden_size", default=4096), config.size("vocab_size", default=151_936)
    num_heads, eps = config.size("num_heads", "num_attention_heads", default=32), _eps(config)
    head_dim = config.size("head_dim", "kv_channels", default=head_size(size, num_heads))
    num_layers = config.size("num_layers", "num_hidden_layers", default=32)
    context = config.size("max_position_embeddings", "seq_length", "max_position_embeddings", default=8192)
    share = config.number("rotary_pct", default=1.0)
    rope = RopeSpec(theta=config.number("rotary_emb_base", default=10_000.0), rotary_dim=int(head_dim * share))
    return DecoderSpec(
        architecture=config.architecture,
        hidden_size=size,
        vocab_size=vocab_size,
        max_position_embeddings=context,
        embedding=EmbeddingSpec(name="transformer.wte", num_rows=vocab_size, size=size),
        layers=tuple(
            _layer(config, f"transformer.h.{index}", size, num_heads, head_dim, rope) for index in range(num_layers)
        ),
        norm=NormSpec(name="transformer.ln_f", size=size, eps=eps),
        head=HeadSpec(name="lm_head", tied=config.flag("tie_word_embeddings", False)),
    )


def _layer(config: ConfigValues, name: str, size: int, num_heads: int, head_dim: int, rope: RopeSpec) -> LayerSpec:
    inner, rows = config.size("intermediate_size", default=22_016) // 2, num_heads * head_dim
    biased = not config.flag("no_bias", True)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        qkv=linear(size, (f"{name}.attn.c_attn", 3 * rows), bias=True),
        output=linear(rows, (f"{name}.attn.c_proj", size), bias=biased),
        scale=head_dim**-0.5,
        rope=rope,
    )
    mlp = MLPSpec(
        up=linear(size, (f"{name}.mlp.w2", inner), (f"{name}.mlp.w1", inner), bias=biased),
        down=linear(inner, (f"{name}.mlp.c_proj", size), bias=biased),
        activation="silu",
        gated=True,
    )
    norms = [NormSpec(name=f"{name}.ln_{number}", size=size, eps=_eps(config)) for number in (1, 2)]
    return sequential(name, (norms[0], attention), (norms[1], mlp))


def _eps(config: ConfigValues) -> float:
    return config.epsilon("layer_norm_epsilon", default=1e-6)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    """Declare a GGUF file's decoder. Old converters write the norms' epsilon under the key of RMS norms."""
    eps = "rms_epsilon" if values.has_key("attention.layer_norm_rms_epsilon") else "epsilon"
    config = GGUFConfig(
        values,
        seq_length=values.integer("context_length"),
        layer_norm_epsilon=values.epsilon(f"attention.layer_norm_{eps}", 1e-6),
        rotary_emb_base=values.number("rope.freq_base", 10_000.0),
    )
    return read_config(config)


_NAMES = GGUFNames(
    layers="transformer.h",
    in_layer={
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.w1",
        "ffn_gate": "mlp.w2",
        "ffn_down": "mlp.c_proj",
    },
    outside_layers={
        "token_embd.weight": "transformer.wte.weight",
        "output_norm.weight": "transformer.ln_f.weight",
        HEAD: "lm_head.weight",
    },
    interleaved={},
)
FAMILY = Family(read_config, read_gguf, _NAMES)
