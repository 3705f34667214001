"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in place of every MLP."""

from __future__ import annotations

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.families.llama_like import decoder, numbers_from_config
from pagemill_models.families.moe import Mixture, mixture, mixture_from_config, with_experts


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=131_072)
    plain = decoder(numbers.with_window(config.window(default=None), range(numbers.num_layers)))
    experts = mixture_from_config(config, size_key="intermediate_size", renormalized=True)
    return with_mixtral_experts(plain, experts)


def with_mixtral_experts(plain: DecoderSpec, experts: Mixture) -> DecoderSpec:
    return with_experts(plain, lambda _, layer: mixture(experts, f"{layer.name}.block_sparse_moe", ("w1", "w3", "w2")))


FAMILY = Family(read_config)
