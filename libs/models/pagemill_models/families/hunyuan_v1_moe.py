"""Hunyuan's mixtures (Tencent, 2025), such as A13B: Hunyuan with experts in every layer beside one shared MLP."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, LayerSpec, MoESpec, SharedExpertSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.parts import linear
from pagemill_models.families import hunyuan_v1_dense
from pagemill_models.families.moe import gated_mlp, mixture, mixture_from_config, with_experts
from pagemill_models.families.qwen2_moe import PARTS


def read_config(config: ConfigValues) -> DecoderSpec:
    experts = mixture_from_config(config, size_key="intermediate_size", renormalized=True)

    def block(_: int, layer: LayerSpec) -> MoESpec:
        name, size = f"{layer.name}.mlp", experts.hidden_size
        shared = gated_mlp(f"{name}.shared_mlp", size, experts.intermediate_size, experts.activation, PARTS)
        return replace(
            mixture(experts, name, PARTS),
            router=linear(size, (f"{name}.gate.wg", experts.num_experts)),
            shared=SharedExpertSpec(mlp=shared),
        )

    return with_experts(hunyuan_v1_dense.read_config(config), block)


FAMILY = Family(read_config)
