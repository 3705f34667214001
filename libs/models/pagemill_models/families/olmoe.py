"""OLMoE (arXiv 2409.02060): Llama with experts, and queries and keys that are normalized over all heads together."""

from __future__ import annotations

import msgspec

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import AttentionSpec, DecoderSpec, LayerSpec, NormSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import sequential
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config
from pagemill_models.families.moe import GGUF_IN_LAYER, mixture, mixture_from_config, with_experts
from pagemill_models.families.qwen2_moe import PARTS


def read_config(config: ConfigValues) -> DecoderSpec:
    biased = config.flag("attention_bias", False)
    numbers = msgspec.structs.replace(
        numbers_from_config(config, default_context=4096), attention_bias=biased, attention_output_bias=biased
    )
    experts = mixture_from_config(
        config,
        size_key="intermediate_size",
        renormalized=config.flag("norm_topk_prob", False),
    )
    sparse = with_experts(decoder(numbers), lambda _, layer: mixture(experts, f"{layer.name}.mlp", PARTS))
    layers = tuple(_changed(layer, numbers.rms_norm_eps, config.optional_number("clip_qkv")) for layer in sparse.layers)
    return msgspec.structs.replace(sparse, layers=layers)


def _changed(layer: LayerSpec, eps: float, clip: float | None) -> LayerSpec:
    attention, experts = layer.blocks()
    assert isinstance(attention, AttentionSpec)
    first, second = layer.norms()
    sizes = {"query": attention.output.in_features, "key": attention.num_kv_heads * attention.head_dim}
    norms = {
        f"{part}_norm": NormSpec(name=f"{layer.name}.self_attn.{part[0]}_norm", size=size, eps=eps)
        for part, size in sizes.items()
    }
    return sequential(layer.name, (first, msgspec.structs.replace(attention, clip=clip, **norms)), (second, experts))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    experts = {
        "num_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
    }
    return read_config(GGUFConfig(values, **experts))


_NAMES = gguf_names(interleaved=False)
FAMILY = Family(read_config, read_gguf, _NAMES._replace(in_layer=_NAMES.in_layer | GGUF_IN_LAYER))
