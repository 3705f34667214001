"""GLM-4.5 to 4.7 (arXiv 2508.06471): DeepSeek-V3's mixtures with plain attention, half of each head rotated."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.families.deepseek_v3 import sigmoid_gating
from pagemill_models.families.llama_like import decoder, numbers_from_config
from pagemill_models.families.moe import (
    mixture_from_config,
    num_drafting,
    with_drafting,
    with_experts,
    with_shared_experts,
)


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(
        config,
        default_context=131_072,
        epsilon=("rms_norm_eps", 1e-5),
        partial_rotary=("partial_rotary_factor", 0.5),
    )
    numbers = replace(
        numbers,
        attention_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
    )
    renormalized = config.flag("norm_topk_prob", True)
    experts = mixture_from_config(config, size_key="moe_intermediate_size", renormalized=renormalized)
    gating = sigmoid_gating(config, experts, default=(1, 1), scale=1.0)
    num_dense = config.integer("first_k_dense_replace", default=1)
    drafting = num_drafting(config, default=1)
    num_shared = config.integer("n_shared_experts", default=1)
    spec = with_experts(
        decoder(replace(numbers, num_layers=numbers.num_layers + min(drafting, 1))),
        lambda index, layer: (
            with_shared_experts(experts, f"{layer.name}.mlp", num_shared, gating) if index >= num_dense else None
        ),
    )
    return with_drafting(spec, numbers.num_layers, drafting)


FAMILY = Family(read_config)
