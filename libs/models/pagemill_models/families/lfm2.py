"""LFM2 (arXiv 2511.23404): short convolutions between gates in most layers, attention in the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagemill_models.declaration.caches import ShortConvolutionSpec
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BlockSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    NormSpec,
    RopeSpec,
)
from pagemill_models.declaration.family import Family, GGUFNames
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import HEAD, GGUFValues
from pagemill_models.declaration.parts import head_size, linear, sequential
from pagemill_models.families.mamba2 import FULL, gguf_kinds
from pagemill_models.families.moe import gated_mlp

CONVOLUTION = "conv"
PARTS = ("w1", "w3", "w2")
"""Names of an MLP's gate, up and down projection."""


def read_config(config: ConfigValues) -> DecoderSpec:
    inner = _inner_size(config)
    num_layers = num_layers_of(config)
    return hybrid(
        config,
        config.layer_types(num_layers) or _by_indices(config, num_layers),
        forward=lambda _, name: gated_mlp(name, config.size("hidden_size"), inner, "silu", PARTS),
    )


def num_layers_of(config: ConfigValues) -> int:
    return config.size("num_layers", "num_hidden_layers")


def hybrid(config: ConfigValues, kinds: list[str], forward: Callable[[int, str], BlockSpec]) -> DecoderSpec:
    """Declare a decoder. `kinds`: of each layer. `forward`: returns a layer's second block for its number and name."""
    size, num_heads = config.size("hidden_size"), config.size("num_heads", "num_attention_heads")
    vocab_size, context = config.size("vocab_size"), config.size("max_position_embeddings", default=128_000)
    head_dim = config.size("head_dim", default=head_size(size, num_heads))
    rope, eps = config.rope(head_dim, context), config.epsilon("norm_eps", default=1e-5)
    unknown = next((kind for kind in kinds if kind not in (FULL, CONVOLUTION)), None)
    if unknown is not None:
        raise config.unsupported(f"layers of the type `{unknown}`")

    def layer(index: int, kind: str) -> LayerSpec:
        name = f"model.layers.{index}"
        norms = [NormSpec(name=f"{name}.{which}_norm", size=size, eps=eps) for which in ("operator", "ffn")]
        mixer = _attention(config, name, rope, eps) if kind == FULL else convolution(config, f"{name}.conv", size)
        return sequential(name, (norms[0], mixer), (norms[1], forward(index, f"{name}.feed_forward")))

    return DecoderSpec(
        architecture=config.architecture,
        hidden_size=size,
        vocab_size=vocab_size,
        max_position_embeddings=context,
        embedding=EmbeddingSpec(name="model.embed_tokens", num_rows=vocab_size, size=size),
        layers=tuple(layer(index, kind) for index, kind in enumerate(kinds)),
        norm=NormSpec(name="model.embedding_norm", size=size, eps=eps),
        head=HeadSpec(name="lm_head", tied=config.flag("tie_embedding", config.flag("tie_word_embeddings", True))),
    )


def _by_indices(config: ConfigValues, num_layers: int) -> list[str]:
    found = set(config.integers("full_attn_idxs")) if config.has("full_attn_idxs") else set(range(num_layers))
    if not found <= set(range(num_layers)):
        raise config.wrong("full_attn_idxs", sorted(found), f"numbers of the {num_layers} layers")
    return [FULL if index in found else CONVOLUTION for index in range(num_layers)]


def _inner_size(config: ConfigValues) -> int:
    size = config.size("intermediate_size", "block_ff_dim", "intermediate_size", default=12_288)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = config.size("block_multiple_of", default=256)
    factor = config.optional_number("block_ffn_dim_multiplier") or 1.0
    inner = int(factor * int(2 * size / 3))
    return max(1, -(-inner // multiple)) * multiple


def _attention(config: ConfigValues, layer: str, rope: RopeSpec, eps: float) -> AttentionSpec:
    name, size = f"{layer}.self_attn", config.size("hidden_size")
    num_heads = config.size("num_heads", "num_attention_heads")
    num_kv_heads = config.size("num_kv_heads", "num_key_value_heads", default=8)
    head_dim = rope.rotary_dim
    rows = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv=linear(size, *((f"{name}.{part}_proj", count) for part, count in rows.items())),
        output=linear(rows["q"], (f"{name}.out_proj", size)),
        scale=head_dim**-0.5,
        rope=rope,
        query_norm=NormSpec(name=f"{name}.q_layernorm", size=head_dim, eps=eps),
        key_norm=NormSpec(name=f"{name}.k_layernorm", size=head_dim, eps=eps),
    )


def convolution(config: ConfigValues, name: str, size: int) -> ShortConvolutionSpec:
    biased = config.flag("conv_bias", False)
    return ShortConvolutionSpec(
        name=f"{name}.conv",
        channels=size,
        width=config.size("conv_L_cache", default=3),
        bias=biased,
        inputs=linear(size, (f"{name}.in_proj", 3 * size), bias=biased),
        output=linear(size, (f"{name}.out_proj", size), bias=biased),
    )


def gguf_config(values: GGUFValues, **own: Any) -> tuple[GGUFConfig, list[str]]:
    """Return the metadata as that of `config.json`, and the kind of each layer: those of convolutions have no heads of
    keys and values. `own`: further keys."""
    num_kv_heads, kinds = gguf_kinds(values)
    config = GGUFConfig(
        values,
        num_key_value_heads=num_kv_heads,
        norm_eps=values.epsilon("attention.layer_norm_rms_epsilon", 1e-5),
        conv_L_cache=values.integer("shortconv.l_cache"),
        conv_bias=values.has_in_layers("shortconv.conv.bias"),
        block_auto_adjust_ff_dim=False,
        **own,
    )
    return config, [FULL if kind == FULL else CONVOLUTION for kind in kinds]


def read_gguf(values: GGUFValues) -> DecoderSpec:
    config, kinds = gguf_config(values)
    inner = _inner_size(config)
    return hybrid(config, kinds, lambda _, name: gated_mlp(name, config.size("hidden_size"), inner, "silu", PARTS))


GGUF_NAMES = GGUFNames(
    "model.layers",
    {
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
        "exp_probs_b.bias": "feed_forward.expert_bias",
        "ffn_gate_exps": "feed_forward.experts.*.w1",
        "ffn_up_exps": "feed_forward.experts.*.w3",
        "ffn_down_exps": "feed_forward.experts.*.w2",
    },
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "token_embd_norm.weight": "model.embedding_norm.weight",
        "output_norm.weight": "model.embedding_norm.weight",
        HEAD: "lm_head.weight",
    },
    {},
    shapes={"shortconv.conv.weight": (-1, 1, 0)},
)
FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
