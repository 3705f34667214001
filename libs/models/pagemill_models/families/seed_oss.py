"""Seed-OSS (ByteDance, 2025): Llama with biases of queries, keys and values, and heads of 128."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.families.llama_like import decoder, numbers_from_config


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


FAMILY = Family(read_config)
