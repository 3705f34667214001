"""Gemma (arXiv 2403.08295): Llama with scaled embeddings, norms with offset 1, gated GELU, and heads of any size."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_norms, with_whole_norms
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    config.refuse_later_tokens()
    numbers = numbers_from_config(config, default_context=8192, default_head_dim=256, default_tied=True)
    biased = config.flag("attention_bias", False)
    # `hidden_act` of the first checkpoints says gelu but means the approximation by tanh.
    plain = decoder(replace(numbers, activation="gelu_tanh", attention_bias=biased, attention_output_bias=biased))
    scaled = replace(plain, embedding=replace(plain.embedding, scale=plain.hidden_size**0.5))
    return with_norms(scaled, lambda norm: replace(norm, weight_offset=1.0))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return with_whole_norms(read_config(GGUFConfig(values)))


FAMILY = Family(read_config, read_gguf, gguf_names(interleaved=False))
