"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with a mixture of experts in place of some MLPs."""

from __future__ import annotations

import msgspec

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import decoder, numbers_from_config, numbers_from_gguf
from pagemill_models.families.moe import mixture, mixture_from_gguf, with_experts
from pagemill_models.families.qwen2_moe import FAMILY as QWEN2_MOE
from pagemill_models.families.qwen2_moe import PARTS, sparse_layers, sparse_mixture


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=32_768)
    window = config.window() if config.flag("use_sliding_window", False) else None
    biased = config.flag("attention_bias", False)
    numbers = numbers.with_window(window, range(numbers.num_layers))
    plain = decoder(msgspec.structs.replace(numbers, attention_bias=biased, attention_output_bias=biased, qk_norm=True))
    experts, sparse = sparse_mixture(config), sparse_layers(config, numbers.num_layers)
    return with_experts(
        plain, lambda index, layer: mixture(experts, f"{layer.name}.mlp", PARTS) if index in sparse else None
    )


def read_gguf(values: GGUFValues) -> DecoderSpec:
    plain = decoder(numbers_from_gguf(values))
    experts = mixture_from_gguf(values, size_key="expert_feed_forward_length", renormalized=True)
    return with_experts(plain, lambda _, layer: mixture(experts, f"{layer.name}.mlp", PARTS))


FAMILY = Family(read_config, read_gguf, QWEN2_MOE.gguf_names)
