"""Command A and R7B (Cohere, 2024): Command R with windows and a rotary embedding in three of four layers."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_attention
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families import cohere


def read_config(config: ConfigValues) -> DecoderSpec:
    plain = cohere.read_config(config)
    window, num_layers = config.window(), len(plain.layers)
    windowed = config.windowed_layers(num_layers) if window is not None else []
    return with_attention(
        plain,
        lambda index, spec: replace(spec, window=window) if index in windowed else replace(spec, rope=None),
    )


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return read_config(cohere.gguf_config(values))


FAMILY = Family(read_config, read_gguf, cohere.GGUF_NAMES)
