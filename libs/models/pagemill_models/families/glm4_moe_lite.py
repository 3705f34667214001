"""GLM-4.7-Flash (Zhipu AI, 2026): GLM-4.5's mixtures with DeepSeek-V3's latent attention."""

from __future__ import annotations

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.families.deepseek_v2 import latent_decoder
from pagemill_models.families.deepseek_v3 import sigmoid_gating
from pagemill_models.families.moe import mixture_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    renormalized = config.flag("norm_topk_prob", True)
    experts = mixture_from_config(config, size_key="moe_intermediate_size", renormalized=renormalized)
    gating = sigmoid_gating(config, experts, default=(1, 1), scale=1.8)
    kinds = config.layer_types(config.size("num_layers", "num_hidden_layers"), "mlp_layer_types")
    num_dense = 1 if kinds is None else kinds.count("dense")
    if kinds is not None and kinds != ["dense"] * num_dense + ["sparse"] * (len(kinds) - num_dense):
        raise config.unsupported("layers other than dense ones, then sparse ones (`mlp_layer_types`)")
    interleaved = config.flag("rope_interleave", True)
    return latent_decoder(config, experts, gating, interleaved=interleaved, context=202_752, dense=num_dense, shared=1)


FAMILY = Family(read_config)
