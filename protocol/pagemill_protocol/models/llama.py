"""Llama (arXiv 2302.13971): the decoder that others descend from; Mistral's files in GGUF's `llama` too."""

from __future__ import annotations

import msgspec

from pagemill_protocol.models.config_values import ConfigValues
from pagemill_protocol.models.declaration import DecoderSpec
from pagemill_protocol.models.family import Family
from pagemill_protocol.models.gguf_values import GGUFValues
from pagemill_protocol.models.llama_like import decoder, gguf_names, numbers_from_config, numbers_from_gguf


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=2048)
    biased = config.flag("attention_bias", False)
    return decoder(
        msgspec.structs.replace(
            numbers,
            attention_bias=biased,
            attention_output_bias=biased,
            mlp_bias=config.flag("mlp_bias", False),
        )
    )


def read_gguf(values: GGUFValues) -> DecoderSpec:
    numbers = numbers_from_gguf(values)
    if numbers.window is not None:
        numbers = msgspec.structs.replace(numbers, architecture="MistralForCausalLM")
    return decoder(numbers)


FAMILY = Family(read_config, read_gguf, gguf_names(interleaved=True))
