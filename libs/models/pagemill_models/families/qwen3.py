"""Qwen3 (arXiv 2505.09388): Llama with normalized queries and keys; windows as in Qwen2."""

from __future__ import annotations

import msgspec

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config
from pagemill_models.families.qwen2 import read_gguf, windowed


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=32_768, default_head_dim=128)
    biased = config.flag("attention_bias", False)
    return decoder(
        msgspec.structs.replace(
            windowed(config, numbers), attention_bias=biased, attention_output_bias=biased, qk_norm=True
        )
    )


FAMILY = Family(read_config, read_gguf, gguf_names(interleaved=False))
