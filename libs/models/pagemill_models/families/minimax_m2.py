"""MiniMax-M2 (MiniMax, 2025): Mixtral's names, sigmoid scores with a bias of choices, norms over all heads at once."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_attention
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, GatingSpec, LayerSpec, MoESpec
from pagemill_models.declaration.family import Family
from pagemill_models.families.llama_like import decoder, numbers_from_config
from pagemill_models.families.moe import mixture, mixture_from_config, num_drafting, with_drafting, with_experts
from pagemill_models.families.olmo2 import whole_norms


def read_config(config: ConfigValues) -> DecoderSpec:
    if not config.flag("use_qk_norm", True):
        raise config.unsupported("queries and keys without norms (`use_qk_norm`)")
    share = 1.0
    if config.has("rotary_dim"):
        share = config.size("rotary_dim") / config.size("head_dim", default=128)
    numbers = numbers_from_config(
        config, default_context=196_608, default_head_dim=128, partial_rotary=("partial_rotary_factor", share)
    )
    experts = mixture_from_config(config, size_key="intermediate_size", renormalized=True)

    def block(_: int, layer: LayerSpec) -> MoESpec:
        name = f"{layer.name}.block_sparse_moe"
        gating = GatingSpec(scores="sigmoid", bias=f"{name}.e_score_correction_bias")
        return replace(mixture(experts, name, ("w1", "w3", "w2")), gating=gating)

    drafting = num_drafting(config, default=0)
    longer = replace(numbers, num_layers=numbers.num_layers + min(drafting, 1))
    plain = with_experts(decoder(longer), block)
    spec = with_attention(plain, lambda index, each: whole_norms(each, plain.layers[index], numbers))
    return with_drafting(spec, numbers.num_layers, drafting)


FAMILY = Family(read_config)
