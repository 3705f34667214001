"""Seed-OSS (ByteDance, 2025): Llama with biases of queries, keys and values, and heads of 128."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=524_288)
    return decoder(
        replace(
            numbers,
            attention_bias=config.flag("attention_bias", True),
            attention_output_bias=config.flag("attention_out_bias", False),
            mlp_bias=config.flag("mlp_bias", False),
        )
    )


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return read_config(GGUFConfig(values, attention_out_bias=values.has("blk.0.attn_output.bias")))


_NAMES = gguf_names(interleaved=False)
_BEHIND = {"post_attention_norm": "post_attention_layernorm"}
FAMILY = Family(read_config, read_gguf, _NAMES._replace(in_layer=_NAMES.in_layer | _BEHIND))
