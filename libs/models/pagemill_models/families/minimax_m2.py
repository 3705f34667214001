"""MiniMax-M2 (MiniMax, 2025): Mixtral's names, sigmoid scores with a bias of choices, norms over all heads at once."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_attention
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, GatingSpec, LayerSpec, MoESpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config
from pagemill_models.families.moe import mixture, mixture_from_config, num_drafting, with_drafting, with_experts
from pagemill_models.families.norms_behind import whole_norms


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
    longer = replace(numbers, num_layers=numbers.num_layers + drafting)
    plain = with_experts(decoder(longer), block)
    spec = with_attention(plain, lambda index, each: whole_norms(each, plain.layers[index], numbers))
    return with_drafting(spec, numbers.num_layers, drafting)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return read_config(
        GGUFConfig(
            values,
            intermediate_size=values.integer("expert_feed_forward_length"),
            num_experts_per_tok=values.integer("expert_used_count"),
            num_local_experts=values.integer("expert_count"),
        )
    )


_IN_LAYER = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
_NAMES = gguf_names(interleaved=False)
FAMILY = Family(read_config, read_gguf, _NAMES._replace(in_layer=_NAMES.in_layer | _IN_LAYER))
