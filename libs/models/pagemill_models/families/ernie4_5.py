"""ERNIE 4.5 (Baidu, 2025): Llama with an interleaved rotary embedding and one flag for all biases."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import Numbers, decoder, gguf_names, numbers_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    return decoder(read_numbers(config))


def read_numbers(config: ConfigValues) -> Numbers:
    numbers = numbers_from_config(config, default_context=131_072)
    biased, rope = config.flag("use_bias", False), replace(numbers.rope, interleaved=True)
    return replace(numbers, rope=rope, attention_bias=biased, attention_output_bias=biased, mlp_bias=biased)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return read_config(GGUFConfig(values, use_bias=values.has("blk.0.attn_q.bias")))


FAMILY = Family(read_config, read_gguf, gguf_names(interleaved=False))
