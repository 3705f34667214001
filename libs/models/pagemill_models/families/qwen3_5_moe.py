"""Qwen3.5's mixtures of experts: its dense models with experts and a gated shared one in every layer."""

from __future__ import annotations

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import numbers_from_config
from pagemill_models.families.moe import mixture_from_config
from pagemill_models.families.qwen2_moe import with_shared
from pagemill_models.families.qwen3_5 import GGUF_NAMES
from pagemill_models.families.qwen3_next import PARTIAL, gguf_experts, gguf_hybrid, hybrid, inner_size

SIZE = "moe_intermediate_size"


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(
        config, default_context=32_768, default_head_dim=256, partial_rotary=PARTIAL, inner_key=SIZE
    )
    experts = mixture_from_config(config, size_key=SIZE, renormalized=True)
    shared_size = config.size("shared_expert_intermediate_size", default=512)
    return hybrid(config, numbers, block_of=lambda _, layer: with_shared(experts, shared_size, layer))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return gguf_hybrid(values, block_of=gguf_experts(values), **inner_size(values))


FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
