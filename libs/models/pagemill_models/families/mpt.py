"""MPT (MosaicML, 2023): ALiBi, no biases, one matrix of queries, keys and values."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import AttentionSpec, DecoderSpec, EmbeddingSpec, HeadSpec, LayerSpec
from pagemill_models.declaration.family import Family, GGUFNames
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import HEAD, GGUFValues
from pagemill_models.declaration.parts import head_size, layer_norm, linear, plain_mlp, sequential


def read_config(config: ConfigValues) -> DecoderSpec:
    _check(config)
    size, vocab_size = config.size("hidden_size", "d_model", default=2048), config.size("vocab_size", default=50_368)
    eps = config.epsilon("layer_norm_epsilon", default=1e-5)
    num_layers = config.size("num_layers", "n_layers", default=24)
    return DecoderSpec(
        architecture=config.architecture,
        hidden_size=size,
        vocab_size=vocab_size,
        max_position_embeddings=config.size("max_position_embeddings", "max_seq_len", default=2048),
        embedding=EmbeddingSpec(name="transformer.wte", num_rows=vocab_size, size=size),
        layers=tuple(_layer(config, f"transformer.blocks.{index}", size, eps) for index in range(num_layers)),
        norm=layer_norm("transformer.norm_f", size, eps, bias=False),
        head=HeadSpec(name="lm_head", tied=config.flag("tie_word_embeddings", True)),
    )


def _check(config: ConfigValues) -> None:
    for key, value in {"qk_ln": False, "alibi": True, "prefix_lm": False}.items():
        found = config.object("attn_config").get(key, value)
        if found != value:
            raise config.unsupported(f"`attn_config.{key}` = {found}")
    if not config.flag("no_bias", True):
        raise config.unsupported("biases")


def _layer(config: ConfigValues, name: str, size: int, eps: float) -> LayerSpec:
    num_heads, inner = (
        config.size("num_heads", "n_heads", default=16),
        size * config.integer("expansion_ratio", default=4),
    )
    settings = config.object("attn_config")
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_size(size, num_heads),
        qkv=linear(size, (f"{name}.attn.Wqkv", 3 * size)),
        output=linear(size, (f"{name}.attn.out_proj", size)),
        scale=_number(config, settings, "softmax_scale") or head_size(size, num_heads) ** -0.5,
        clip=_number(config, settings, "clip_qkv"),
        alibi_slopes=_slopes(num_heads, _number(config, settings, "alibi_bias_max") or 8.0),
    )
    mlp = plain_mlp(
        linear(size, (f"{name}.ffn.up_proj", inner)), linear(inner, (f"{name}.ffn.down_proj", size)), "gelu"
    )
    norms = [layer_norm(f"{name}.norm_{number}", size, eps, bias=False) for number in (1, 2)]
    return sequential(name, (norms[0], attention), (norms[1], mlp))


def _number(config: ConfigValues, settings: dict[str, Any], key: str) -> float | None:
    value = settings.get(key)
    if value is None or (isinstance(value, (int, float)) and value > 0):
        return value
    raise config.wrong(f"attn_config.{key}", value, "a positive number")


@lru_cache
def _slopes(num_heads: int, most: float) -> tuple[float, ...]:
    """Return slopes as `parts.alibi_slopes`, down to 2^-`most`.

    Numbers of heads that are no power of two take every second slope of the next power, then the others.
    """
    power = 1 << math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-most * (head + 1) / power) for head in range(power)]
    return tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


def read_gguf(values: GGUFValues) -> DecoderSpec:
    size, steepest = values.size("hidden_size", "embedding_length"), values.number("attention.max_alibi_bias", 0.0)
    config = GGUFConfig(
        values,
        d_model=size,
        n_heads=values.integer("attention.head_count"),
        n_layers=values.integer("block_count"),
        max_seq_len=values.integer("context_length"),
        expansion_ratio=values.integer("feed_forward_length") // size,
        no_bias=not values.has("blk.0.attn_qkv.bias"),
        attn_config={
            "alibi": steepest > 0,
            "alibi_bias_max": steepest,
            "clip_qkv": values.number("attention.clamp_kqv", 0.0) or None,
            "qk_ln": values.has("blk.0.attn_q_norm.weight"),
        },
    )
    return read_config(config)


_NAMES = GGUFNames(
    layers="transformer.blocks",
    in_layer={
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
    outside_layers={
        "token_embd.weight": "transformer.wte.weight",
        "output_norm.weight": "transformer.norm_f.weight",
        HEAD: "lm_head.weight",
    },
    interleaved={},
)
FAMILY = Family(read_config, read_gguf, _NAMES)
