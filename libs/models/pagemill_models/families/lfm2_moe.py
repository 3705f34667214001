"""LFM2's mixtures of experts (Liquid AI, 2025): LFM2 with experts in all but the first layers, chosen by sigmoids."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import BlockSpec, DecoderSpec, GatingSpec
from pagemill_models.declaration.family import Family
from pagemill_models.families.lfm2 import PARTS, hybrid, num_layers_of
from pagemill_models.families.moe import gated_mlp, mixture, mixture_from_config

STACKED = {
    ".experts.gate_up_proj": (".experts.*.w1.weight", ".experts.*.w3.weight"),
    ".experts.down_proj": (".experts.*.w2.weight",),
}


def read_config(config: ConfigValues) -> DecoderSpec:
    experts = mixture_from_config(
        config, size_key="moe_intermediate_size", renormalized=config.flag("norm_topk_prob", True)
    )
    num_layers, num_dense = num_layers_of(config), config.integer("num_dense_layers", default=2)
    kinds = config.layer_types(num_layers)
    if kinds is None:
        raise config.wrong("layer_types", None, f"a list of {num_layers} names")
    scale, biased = config.number("routed_scaling_factor", default=1.0), config.flag("use_expert_bias", True)
    inner = config.size("intermediate_size", default=7168)

    def forward(index: int, name: str) -> BlockSpec:
        if index < num_dense:
            return gated_mlp(name, experts.hidden_size, inner, "silu", PARTS)
        bias = f"{name}.expert_bias" if biased else None
        return replace(mixture(experts, name, PARTS), gating=GatingSpec(scores="sigmoid", bias=bias, scale=scale))

    return replace(hybrid(config, kinds, forward), stacked=STACKED)


FAMILY = Family(read_config)
