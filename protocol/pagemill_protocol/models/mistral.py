"""Mistral (arXiv 2310.06825): Llama with a sliding window in every layer."""

from __future__ import annotations

from pagemill_protocol.models.config_values import ConfigValues
from pagemill_protocol.models.declaration import DecoderSpec
from pagemill_protocol.models.family import Family
from pagemill_protocol.models.llama_like import decoder, numbers_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=131_072)
    return decoder(numbers.with_window(config.window(), range(numbers.num_layers)))


FAMILY = Family(read_config)
