"""Qwen3.5's dense models: gated delta rules in three of four layers, gated attention in the others."""

from __future__ import annotations

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.families.llama_like import numbers_from_config
from pagemill_models.families.qwen3_next import PARTIAL, hybrid


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=32_768, default_head_dim=256, partial_rotary=PARTIAL)
    return hybrid(config, numbers, grouped=False)


FAMILY = Family(read_config)
