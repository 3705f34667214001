"""GPT-J (Wang and Komatsuzaki, 2021): interleaved partial rotary embedding, parallel attention and MLP after one
norm."""

from __future__ import annotations

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
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import head_size, layer_norm, linear, parallel, plain_mlp


def read_config(config: ConfigValues) -> DecoderSpec:
    size, num_heads = config.size("hidden_size", "n_embd"), config.size("num_heads", "n_head")
    vocab_size, eps = config.size("vocab_size"), config.epsilon("layer_norm_epsilon", default=1e-5)
    num_layers = config.size("num_layers", "n_layer")
    rotary_dim = config.optional_integer("rotary_dim", default=64) or head_size(size, num_heads)
    rope = RopeSpec(theta=10_000.0, rotary_dim=rotary_dim, interleaved=True)
    return DecoderSpec(
        architecture=config.architecture,
        hidden_size=size,
        vocab_size=vocab_size,
        max_position_embeddings=config.size("max_position_embeddings", "n_positions", default=2048),
        embedding=EmbeddingSpec(name="transformer.wte", num_rows=vocab_size, size=size),
        layers=tuple(_layer(config, index, size, num_heads, rope, eps) for index in range(num_layers)),
        norm=layer_norm("transformer.ln_f", size, eps),
        head=HeadSpec(name="lm_head", tied=config.flag("tie_word_embeddings", False), bias=True),
        ignored=(".attn.bias", ".attn.masked_bias"),
        optional_prefix="transformer.",
    )


def _layer(config: ConfigValues, index: int, size: int, num_heads: int, rope: RopeSpec, eps: float) -> LayerSpec:
    name, head_dim = f"transformer.h.{index}", head_size(size, num_heads)
    inner = config.size("intermediate_size", "n_inner", default=4 * size)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        qkv=linear(size, *((f"{name}.attn.{part}_proj", size) for part in "qkv")),
        output=linear(size, (f"{name}.attn.out_proj", size)),
        scale=head_dim**-0.5,
        rope=rope,
    )
    mlp = plain_mlp(
        linear(size, (f"{name}.mlp.fc_in", inner), bias=True),
        linear(inner, (f"{name}.mlp.fc_out", size), bias=True),
        config.activation("activation_function", default="gelu_new"),
    )
    norm = layer_norm(f"{name}.ln_1", size, eps)
    return parallel(name, (norm, attention), (norm, mlp))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    config = GGUFConfig(
        values,
        n_embd=values.integer("embedding_length"),
        n_head=values.integer("attention.head_count"),
        n_layer=values.integer("block_count"),
        n_positions=values.integer("context_length"),
        n_inner=values.integer("feed_forward_length"),
        rotary_dim=values.integer("rope.dimension_count"),
    )
    return read_config(config)


_IN_LAYER = {
    "attn_norm": "ln_1",
    "attn_q": "attn.q_proj",
    "attn_k": "attn.k_proj",
    "attn_v": "attn.v_proj",
    "attn_output": "attn.out_proj",
    "ffn_up": "mlp.fc_in",
    "ffn_down": "mlp.fc_out",
}
_OUTSIDE_LAYERS = {
    "token_embd.weight": "transformer.wte.weight",
    "output_norm.weight": "transformer.ln_f.weight",
    "output_norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
FAMILY = Family(read_config, read_gguf, GGUFNames("transformer.h", _IN_LAYER, _OUTSIDE_LAYERS, {}))
