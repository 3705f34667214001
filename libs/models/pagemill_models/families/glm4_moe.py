"""GLM-4.5 to 4.7 (arXiv 2508.06471): DeepSeek-V3's mixtures with plain attention, half of each head rotated."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.deepseek_v3 import SHARED_IN_LAYER, SIGMOID, sigmoid_gating
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config
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
        decoder(replace(numbers, num_layers=numbers.num_layers + drafting)),
        lambda index, layer: (
            with_shared_experts(experts, f"{layer.name}.mlp", num_shared, gating) if index >= num_dense else None
        ),
    )
    return with_drafting(spec, numbers.num_layers, drafting)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    config = GGUFConfig(
        values,
        first_k_dense_replace=values.integer("leading_dense_block_count", 0),
        moe_intermediate_size=values.integer("expert_feed_forward_length"),
        n_group=values.integer("expert_group_count", 1),
        n_routed_experts=values.integer("expert_count"),
        n_shared_experts=values.integer("expert_shared_count", 1),
        norm_topk_prob=values.flag("expert_weights_norm", True),
        num_experts_per_tok=values.integer("expert_used_count"),
        routed_scaling_factor=values.number("expert_weights_scale", 1.0),
        topk_group=values.integer("expert_group_used_count", 1),
        use_qk_norm=values.has("blk.0.attn_q_norm.weight"),
    )
    if values.integer("expert_gating_func", SIGMOID) != SIGMOID:
        raise values.unsupported("experts that are not chosen by sigmoids")
    return read_config(config)


_IN_LAYER = {
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_NAMES = gguf_names(interleaved=False)
GGUF_NAMES = _NAMES._replace(in_layer=_NAMES.in_layer | SHARED_IN_LAYER | _IN_LAYER)
FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
