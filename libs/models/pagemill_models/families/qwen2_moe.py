"""Qwen2-MoE (arXiv 2407.10671): Qwen2 with experts in some layers and a gated shared expert."""

from __future__ import annotations

from functools import partial

import msgspec

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, LayerSpec, MoESpec, SharedExpertSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import linear
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config, numbers_from_gguf
from pagemill_models.families.moe import (
    GGUF_IN_LAYER,
    ONE_ROW,
    Mixture,
    gated_mlp,
    mixture,
    mixture_from_config,
    mixture_from_gguf,
    with_experts,
)

PARTS = ("gate_proj", "up_proj", "down_proj")


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=32_768)
    if config.flag("use_sliding_window", False):
        kinds = config.layer_types(numbers.num_layers) or [
            "sliding_attention" if layer % 2 == 0 and layer < config.integer("max_window_layers", default=28) else ""
            for layer in range(numbers.num_layers)
        ]
        windowed = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
        numbers = numbers.with_window(config.window(), windowed)
    plain = decoder(msgspec.structs.replace(numbers, attention_bias=config.flag("qkv_bias", True)))
    experts, shared_size = sparse_mixture(config), config.size("shared_expert_intermediate_size", default=5632)
    sparse = sparse_layers(config, numbers.num_layers)
    return with_experts(
        plain, lambda index, layer: with_shared(experts, shared_size, layer) if index in sparse else None
    )


def sparse_mixture(config: ConfigValues, *, renormalized: bool = False) -> Mixture:
    """Read the numbers. `renormalized`: the default of `norm_topk_prob`."""
    return mixture_from_config(
        config,
        size_key="moe_intermediate_size",
        renormalized=config.flag("norm_topk_prob", renormalized),
    )


def sparse_layers(config: ConfigValues, num_layers: int) -> set[int]:
    """Return every `decoder_sparse_step`-th layer except those of `mlp_only_layers`."""
    step, dense = config.size("decoder_sparse_step", default=1), config.integers("mlp_only_layers")
    return {index for index in range(num_layers) if (index + 1) % step == 0 and index not in dense}


def with_shared(experts: Mixture, shared_size: int, layer: LayerSpec) -> MoESpec:
    name, size = f"{layer.name}.mlp", experts.hidden_size
    shared = SharedExpertSpec(
        mlp=gated_mlp(f"{name}.shared_expert", size, shared_size, experts.activation, PARTS),
        gate=linear(size, (f"{name}.shared_expert_gate", 1)),
    )
    return msgspec.structs.replace(mixture(experts, name, PARTS), shared=shared)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    plain = decoder(numbers_from_gguf(values))
    experts = mixture_from_gguf(values, size_key="expert_feed_forward_length", renormalized=False)
    shared_size = values.size("intermediate_size", "expert_shared_feed_forward_length")
    block = partial(with_shared, experts, shared_size)
    return with_experts(plain, lambda _, layer: block(layer))


NAMES = gguf_names(interleaved=False)
FAMILY = Family(read_config, read_gguf, NAMES._replace(in_layer=NAMES.in_layer | GGUF_IN_LAYER, shapes=ONE_ROW))
