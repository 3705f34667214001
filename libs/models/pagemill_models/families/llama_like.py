"""Decoders like Llama: RMS norms before a grouped-query attention with rotary embedding and before a gated MLP.

A family reads its numbers (`numbers_from_config`, `numbers_from_gguf`) and changes some; `decoder` declares the layers
with the names of Llama's checkpoints.
"""

from __future__ import annotations

import msgspec

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RopeSpec,
)
from pagemill_models.declaration.family import GGUFNames
from pagemill_models.declaration.gguf_values import HEAD, ROPE_DIVISORS, ROPE_FACTORS, GGUFValues
from pagemill_models.declaration.parts import head_size, linear, sequential


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope: RopeSpec
    rms_norm_eps: float
    tied: bool
    activation: Activation = "silu"
    attention_bias: bool = False
    """Bias of the query, key and value projections."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalized per head."""
    fused: bool = False
    """Whether `qkv_proj` and `gate_up_proj` are stored as one matrix each."""
    window: int | None = None
    window_layers: frozenset[int] = frozenset()
    """Layers that attend to the last `window` tokens; the others attend to all."""

    def with_window(self, window: int | None, layers: range | list[int]) -> Numbers:
        """Return the numbers with a window in these layers; without layers there is no window."""
        window = window if layers else None
        return msgspec.structs.replace(self, window=window, window_layers=frozenset(layers if window else ()))


def numbers_from_config(
    config: ConfigValues,
    *,
    default_context: int,
    default_head_dim: int | None = None,
    default_tied: bool = False,
    default_activation: str = "silu",
    epsilon: tuple[str, float] = ("rms_norm_eps", 1e-6),
    partial_rotary: tuple[str, float] | None = None,
    rope_kind: str | None = None,
    inner_key: str = "intermediate_size",
) -> Numbers:
    """Read the keys that similar classes of transformers share, without biases and windows.

    Defaults for missing keys are those of the architecture's configuration class. `epsilon`: key of the norms' epsilon
    and its default. `partial_rotary` and `rope_kind`: `partial` and `kind` of `ConfigValues.rope`. `inner_key`: key of
    the inner values of MLPs.
    """
    num_heads, hidden_size = config.size("num_heads", "num_attention_heads"), config.size("hidden_size")
    context = config.size("max_position_embeddings", default=default_context)
    head_dim = config.size("head_dim", default=default_head_dim or head_size(hidden_size, num_heads))
    return Numbers(
        architecture=config.architecture,
        num_layers=config.size("num_layers", "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=config.size("intermediate_size", inner_key),
        num_heads=num_heads,
        num_kv_heads=config.size("num_kv_heads", "num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        vocab_size=config.size("vocab_size"),
        max_position_embeddings=context,
        rope=config.rope(head_dim, context, partial=partial_rotary, kind=rope_kind),
        rms_norm_eps=config.epsilon(epsilon[0], default=epsilon[1]),
        tied=config.flag("tie_word_embeddings", default_tied),
        activation=config.activation("hidden_act", default=default_activation),
    )


def numbers_from_gguf(values: GGUFValues) -> Numbers:
    """Read the keys and tensor names of GGUF converters for these architectures, with the file's biases and norms."""
    num_heads, hidden_size = (
        values.size("num_heads", "attention.head_count"),
        values.size("hidden_size", "embedding_length"),
    )
    num_layers, head_dim = values.size("num_layers", "block_count"), values.head_dim(hidden_size, num_heads)
    context = values.size("max_position_embeddings", "context_length")
    return Numbers(
        architecture=values.architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=values.size("intermediate_size", "feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=values.size("num_kv_heads", "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=values.vocab_size(),
        max_position_embeddings=context,
        rope=values.rope(head_dim, context),
        rms_norm_eps=values.epsilon("attention.layer_norm_rms_epsilon", 1e-6),
        tied=not values.has(HEAD),
        attention_bias=values.has("blk.0.attn_q.bias"),
        attention_output_bias=values.has("blk.0.attn_output.bias"),
        mlp_bias=values.has("blk.0.ffn_gate.bias"),
        qk_norm=values.has("blk.0.attn_q_norm.weight"),
    ).with_window(values.window(), range(num_layers))


def decoder(numbers: Numbers) -> DecoderSpec:
    return DecoderSpec(
        architecture=numbers.architecture,
        hidden_size=numbers.hidden_size,
        vocab_size=numbers.vocab_size,
        max_position_embeddings=numbers.max_position_embeddings,
        embedding=EmbeddingSpec(name="model.embed_tokens", num_rows=numbers.vocab_size, size=numbers.hidden_size),
        layers=tuple(_layer(numbers, index) for index in range(numbers.num_layers)),
        norm=NormSpec(name="model.norm", size=numbers.hidden_size, eps=numbers.rms_norm_eps),
        head=HeadSpec(name="lm_head", tied=numbers.tied),
    )


def _layer(numbers: Numbers, index: int) -> LayerSpec:
    return named_layer(numbers, index, f"model.layers.{index}")


def named_layer(numbers: Numbers, index: int, name: str) -> LayerSpec:
    """Declare a layer. `name`: prefix of its tensors' names."""
    size, eps = numbers.hidden_size, numbers.rms_norm_eps
    attention = _attention(numbers, f"{name}.self_attn", numbers.window if index in numbers.window_layers else None)
    norms = [NormSpec(name=f"{name}.{which}_layernorm", size=size, eps=eps) for which in ("input", "post_attention")]
    return sequential(name, (norms[0], attention), (norms[1], mlp(numbers, f"{name}.mlp")))


def _attention(numbers: Numbers, name: str, window: int | None) -> AttentionSpec:
    head_dim, eps = numbers.head_dim, numbers.rms_norm_eps
    query_rows, key_rows = numbers.num_heads * head_dim, numbers.num_kv_heads * head_dim
    rows = {"q": query_rows, "k": key_rows, "v": key_rows}
    rows = {"qkv": sum(rows.values())} if numbers.fused else rows
    parts = [(f"{name}.{part}_proj", count) for part, count in rows.items()]
    return AttentionSpec(
        num_heads=numbers.num_heads,
        num_kv_heads=numbers.num_kv_heads,
        head_dim=head_dim,
        qkv=linear(numbers.hidden_size, *parts, bias=numbers.attention_bias),
        output=linear(query_rows, (f"{name}.o_proj", numbers.hidden_size), bias=numbers.attention_output_bias),
        scale=head_dim**-0.5,
        rope=numbers.rope,
        query_norm=NormSpec(name=f"{name}.q_norm", size=head_dim, eps=eps) if numbers.qk_norm else None,
        key_norm=NormSpec(name=f"{name}.k_norm", size=head_dim, eps=eps) if numbers.qk_norm else None,
        window=window,
    )


def mlp(numbers: Numbers, name: str) -> MLPSpec:
    """Declare an MLP. `name`: prefix of its tensors' names."""
    inner, bias = numbers.intermediate_size, numbers.mlp_bias
    rows = {"gate_up": 2 * inner} if numbers.fused else {"gate": inner, "up": inner}
    parts = [(f"{name}.{part}_proj", count) for part, count in rows.items()]
    return MLPSpec(
        up=linear(numbers.hidden_size, *parts, bias=bias),
        down=linear(inner, (f"{name}.down_proj", numbers.hidden_size), bias=bias),
        activation=numbers.activation,
        gated=True,
    )


def gguf_names(interleaved: bool) -> GGUFNames:
    """Return the names. `interleaved`: converters interleave the rotary halves of queries and keys."""
    in_layer = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "nextn.eh_proj": "eh_proj",
        "nextn.enorm": "enorm",
        "nextn.hnorm": "hnorm",
        "nextn.shared_head_norm": "shared_head.norm",
        "nextn.shared_head_head": "shared_head.head",
        "nextn.embed_tokens": "embed_tokens",
    }
    outside_layers = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output_norm.bias": "model.norm.bias",
        HEAD: "lm_head.weight",
        "output.bias": "lm_head.bias",
        ROPE_FACTORS: ROPE_DIVISORS,
    }
    heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    return GGUFNames("model.layers", in_layer, outside_layers, heads if interleaved else {})
