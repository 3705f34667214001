"""The text part of Qwen3-VL-MoE (arXiv 2511.21631): Qwen3-MoE, whose files store all experts of a layer at once."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, LayerSpec, MoESpec
from pagemill_models.declaration.family import Family
from pagemill_models.families.llama_like import decoder, numbers_from_config
from pagemill_models.families.moe import mixture, mixture_from_config, stored_together, with_experts
from pagemill_models.families.qwen2_moe import PARTS, sparse_layers


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=128_000)
    biased = config.flag("attention_bias", False)
    plain = decoder(replace(numbers, attention_bias=biased, attention_output_bias=biased, qk_norm=True))
    experts = mixture_from_config(config, size_key="moe_intermediate_size", renormalized=True)
    sparse = sparse_layers(config, numbers.num_layers)

    def block(index: int, layer: LayerSpec) -> MoESpec | None:
        spec = mixture(experts, f"{layer.name}.mlp", PARTS)
        return stored_together(spec, transposed=True) if index in sparse else None

    return with_experts(plain, block)


FAMILY = Family(read_config)
