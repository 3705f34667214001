"""LFM2's mixtures of experts (Liquid AI, 2025): LFM2 with experts in all but the first layers, chosen by sigmoids."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import BlockSpec, DecoderSpec, GatingSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.lfm2 import GGUF_NAMES, PARTS, gguf_config, hybrid, num_layers_of
from pagemill_models.families.moe import Mixture, gated_mlp, mixture, mixture_from_config, mixture_from_gguf

SIGMOID = 2
"""Of llama.cpp's gating functions."""
STACKED = {
    ".experts.gate_up_proj": (".experts.*.w1.weight", ".experts.*.w3.weight"),
    ".experts.down_proj": (".experts.*.w2.weight",),
}


def read_config(config: ConfigValues) -> DecoderSpec:
    num_layers = num_layers_of(config)
    kinds = config.layer_types(num_layers)
    if kinds is None:
        raise config.wrong("layer_types", None, f"a list of {num_layers} names")
    experts = mixture_from_config(
        config, size_key="moe_intermediate_size", renormalized=config.flag("norm_topk_prob", True)
    )
    return _sparse(config, kinds, experts)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    if values.integer("expert_gating_func", SIGMOID) != SIGMOID:
        raise values.unsupported("experts that are not chosen by sigmoids")
    config, kinds = gguf_config(
        values,
        num_dense_layers=values.integer("leading_dense_block_count", 0),
        routed_scaling_factor=values.number("expert_weights_scale", 1.0),
        use_expert_bias=values.has_in_layers("exp_probs_b.bias"),
    )
    renormalized = values.flag("expert_weights_norm", True)
    return _sparse(
        config, kinds, mixture_from_gguf(values, size_key="expert_feed_forward_length", renormalized=renormalized)
    )


def _sparse(config: ConfigValues, kinds: list[str], experts: Mixture) -> DecoderSpec:
    num_dense = config.integer("num_dense_layers", default=2)
    scale, biased = config.number("routed_scaling_factor", default=1.0), config.flag("use_expert_bias", True)
    inner = config.size("intermediate_size", default=7168)

    def forward(index: int, name: str) -> BlockSpec:
        if index < num_dense:
            return gated_mlp(name, experts.hidden_size, inner, "silu", PARTS)
        bias = f"{name}.expert_bias" if biased else None
        return replace(mixture(experts, name, PARTS), gating=GatingSpec(scores="sigmoid", bias=bias, scale=scale))

    return replace(hybrid(config, kinds, forward), stacked=STACKED)


FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
