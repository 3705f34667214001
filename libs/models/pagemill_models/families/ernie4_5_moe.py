"""ERNIE 4.5's mixtures (Baidu, 2025): experts are chosen by biased shares of a softmax, beside shared ones."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, GatingSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.deepseek_v3 import SHARED_IN_LAYER
from pagemill_models.families.ernie4_5 import read_numbers
from pagemill_models.families.llama_like import decoder, gguf_names
from pagemill_models.families.moe import mixture_from_config, with_experts, with_shared_experts


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = read_numbers(config)
    if numbers.mlp_bias:
        raise config.unsupported("biases beside experts (`use_bias`)")
    experts = mixture_from_config(config, size_key="moe_intermediate_size", renormalized=True)
    first, last = config.integer("moe_layer_start_index", default=1), config.integer("moe_layer_end_index", default=-1)
    last, interval = numbers.num_layers - 1 if last == -1 else last, config.size("moe_layer_interval", default=1)
    num_shared = config.integer("moe_num_shared_experts", default=2)

    def gating(name: str) -> GatingSpec:
        return GatingSpec(scores="softmax", bias=f"{name}.moe_statics.e_score_correction_bias")

    return replace(
        with_experts(
            decoder(numbers),
            lambda index, layer: (
                with_shared_experts(experts, f"{layer.name}.mlp", num_shared, gating)
                if first <= index <= last and (index + 1) % interval == 0
                else None
            ),
        ),
        ignored_layers=("model.mtp_",),
    )


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return read_config(
        GGUFConfig(
            values,
            moe_intermediate_size=values.integer("expert_feed_forward_length"),
            moe_layer_interval=values.integer("interleave_moe_layer_step", 1),
            moe_layer_start_index=values.integer("leading_dense_block_count", 0),
            moe_num_experts=values.integer("expert_count"),
            moe_num_shared_experts=values.integer("expert_shared_count", 0),
            num_experts_per_tok=values.integer("expert_used_count"),
        )
    )


_NAMES = gguf_names(interleaved=False)
_BIAS = {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}
FAMILY = Family(read_config, read_gguf, _NAMES._replace(in_layer=_NAMES.in_layer | SHARED_IN_LAYER | _BIAS))
