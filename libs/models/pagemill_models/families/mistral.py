"""Mistral (arXiv 2310.06825): Llama with a sliding window in every layer."""

from __future__ import annotations

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.families.llama_like import decoder, numbers_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=131_072)
    return decoder(numbers.with_window(config.window(), range(numbers.num_layers)))


FAMILY = Family(read_config)
