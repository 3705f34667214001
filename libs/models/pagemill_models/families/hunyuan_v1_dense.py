"""Hunyuan (Tencent, 2025): Llama with norms of queries and keys behind the rotation."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_attention
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import AttentionSpec, DecoderSpec, LayerSpec, NormSpec, RopeSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.rope_scaling import DynamicScaling
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=2048, epsilon=("rms_norm_eps", 1e-5))
    biased = config.flag("attention_bias", False)
    rope = _stretched(config, numbers.rope)
    plain = decoder(replace(numbers, rope=rope, attention_bias=biased, attention_output_bias=biased))
    return with_attention(plain, lambda index, spec: _attention(spec, plain.layers[index], numbers.rms_norm_eps))


def _stretched(config: ConfigValues, rope: RopeSpec) -> RopeSpec:
    """Return the rotary embedding; with an `alpha`, `dynamic` means a larger base for contexts of any length."""
    key = "rope_scaling" if config.object("rope_scaling") else "rope_parameters"
    alpha = config.object(key).get("alpha")
    if not alpha or not isinstance(rope.scaling, DynamicScaling):
        return rope
    if type(alpha) not in (int, float) or not 1 <= alpha <= 1e12:
        raise config.wrong(f"{key}.alpha", alpha, "a number from 1 on")
    size = rope.rotary_dim
    return replace(rope, theta=rope.theta * alpha ** (size / max(1, size - 2)), scaling=None)


def _attention(plain: AttentionSpec, layer: LayerSpec, eps: float) -> AttentionSpec:
    query, key = (
        NormSpec(name=f"{layer.name}.self_attn.{part}_layernorm", size=plain.head_dim, eps=eps)
        for part in ("query", "key")
    )
    return replace(plain, query_norm=query, key_norm=key, norms_behind_rotation=True)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return read_config(GGUFConfig(values))


_NAMES = gguf_names(interleaved=False)
_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
GGUF_NAMES = _NAMES._replace(in_layer=_NAMES.in_layer | _NORMS)
FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
