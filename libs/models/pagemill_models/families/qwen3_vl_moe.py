"""The text part of Qwen3-VL-MoE (arXiv 2511.21631): Qwen3-MoE, whose files store all experts of a layer at once."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, LayerSpec, MoESpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.parts import linear
from pagemill_models.families.llama_like import decoder, numbers_from_config
from pagemill_models.families.moe import Mixture, mixture, mixture_from_config, with_experts
from pagemill_models.families.qwen2_moe import PARTS, sparse_layers


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=128_000)
    biased = config.flag("attention_bias", False)
    plain = decoder(replace(numbers, attention_bias=biased, attention_output_bias=biased, qk_norm=True))
    experts = mixture_from_config(config, size_key="moe_intermediate_size", renormalized=True)
    sparse = sparse_layers(config, numbers.num_layers)
    spec = with_experts(plain, lambda index, layer: _mixture(experts, layer) if index in sparse else None)
    return replace(spec, stacked={f".experts.{part}": (f".experts.*.{part}.weight",) for part in STORED})


def _mixture(numbers: Mixture, layer: LayerSpec) -> MoESpec:
    spec = mixture(numbers, f"{layer.name}.mlp", PARTS)
    size, inner = numbers.hidden_size, numbers.intermediate_size
    experts = []
    for index, each in enumerate(spec.experts):
        name = f"{layer.name}.mlp.experts.{index}"
        up = linear(size, (f"{name}.{STORED[0]}", 2 * inner), transposed=True)
        experts.append(replace(each, up=up, down=linear(inner, (f"{name}.{STORED[1]}", size), transposed=True)))
    return replace(spec, experts=tuple(experts))


STORED = ("gate_up_proj", "down_proj")
FAMILY = Family(read_config)
