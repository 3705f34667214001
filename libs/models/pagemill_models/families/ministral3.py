"""Ministral 3 (Mistral AI, 2025): Mistral whose queries grow with their position behind the original context."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_attention
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=262_144, default_head_dim=128, epsilon=("rms_norm_eps", 1e-5))
    plain = decoder(numbers.with_window(config.window(default=None), range(numbers.num_layers)))
    growth = config.query_growth()
    return with_attention(plain, lambda _, spec: replace(spec, query_growth=growth))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    """Declare a GGUF file's decoder: this family's, or that of a Mistral in a multimodal model."""
    return read_config(GGUFConfig(values))


FAMILY = Family(read_config, read_gguf, gguf_names(interleaved=True))
