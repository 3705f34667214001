"""InternLM (InternLM team, 2023) and InternLM 3: Llama with biases on queries, keys and values, and optionally
others."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.families.llama_like import decoder, numbers_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    is_first = config.architecture == "InternLMForCausalLM"
    numbers = numbers_from_config(config, default_context=2048 if is_first else 32_768)
    biased = config.flag("bias", is_first)
    return decoder(
        replace(
            numbers,
            attention_bias=biased if is_first else config.flag("qkv_bias", False),
            attention_output_bias=biased,
            mlp_bias=biased and not is_first,
        )
    )


FAMILY = Family(read_config)
