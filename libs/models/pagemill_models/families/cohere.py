"""Command R (Cohere, 2024): parallel blocks after one norm without a bias, an interleaved rotary embedding."""

from __future__ import annotations

from pagemill_models.declaration.changes import changed_head, replace, side_by_side, with_head_norms, with_layer_norms
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=8192, default_tied=True, epsilon=("layer_norm_eps", 1e-5))
    biased = config.flag("attention_bias", False)
    numbers = replace(
        numbers, rope=replace(numbers.rope, interleaved=True), attention_bias=biased, attention_output_bias=biased
    )
    plain = side_by_side(with_layer_norms(decoder(numbers), bias=False))
    if config.flag("use_qk_norm", False):
        plain = with_head_norms(plain, ("q_norm", "k_norm"), numbers.rms_norm_eps, of_each_head=True)
    return replace(plain, head=changed_head(plain, scale=config.number("logit_scale", default=0.0625)))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return read_config(gguf_config(values))


def gguf_config(values: GGUFValues) -> GGUFConfig:
    scale, normed = values.number("logit_scale", 0.0625), values.has("blk.0.attn_q_norm.weight")
    return GGUFConfig(values, logit_scale=scale, use_qk_norm=normed)


GGUF_NAMES = gguf_names(interleaved=False)
FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
