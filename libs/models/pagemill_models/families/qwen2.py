"""Qwen2 (arXiv 2407.10671): Llama with biases on query, key and value, and a sliding window in some layers."""

from __future__ import annotations

import msgspec

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import Numbers, decoder, gguf_names, numbers_from_config, numbers_from_gguf


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=32_768)
    return decoder(msgspec.structs.replace(windowed(config, numbers), attention_bias=True))


def windowed(config: ConfigValues, numbers: Numbers) -> Numbers:
    """Return numbers with a window in the layers of `layer_types`, or in those from `max_window_layers` on."""
    if not config.flag("use_sliding_window", False):
        return numbers
    kinds = config.layer_types(numbers.num_layers)
    if kinds is None:
        layers = list(range(max(0, config.integer("max_window_layers", default=28)), numbers.num_layers))
    else:
        layers = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    return numbers.with_window(config.window(), layers)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return decoder(numbers_from_gguf(values))


FAMILY = Family(read_config, read_gguf, gguf_names(interleaved=False))
