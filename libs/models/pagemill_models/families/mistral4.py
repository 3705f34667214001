"""Mistral 4 (Mistral AI, 2026): DeepSeek's latent attention and experts, with Ministral 3's growth of queries."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import BranchSpec, DecoderSpec, GatingSpec, LatentAttentionSpec, MoESpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.deepseek_v2 import latent_decoder, read_groups, read_scale
from pagemill_models.families.deepseek_v3 import GGUF_NAMES, SOFTMAX, latent_keys
from pagemill_models.families.moe import mixture_from_config, stored_together


def read_config(config: ConfigValues) -> DecoderSpec:
    return _decoder(config, together=True)


def _decoder(config: ConfigValues, *, together: bool) -> DecoderSpec:
    """Declare the decoder. `together`: whether an expert's gate and up projection are one matrix."""
    renormalized = config.flag("norm_topk_prob", True)
    experts = mixture_from_config(config, size_key="moe_intermediate_size", renormalized=renormalized)
    groups = read_groups(config, experts, default=(1, 1))
    gating = GatingSpec(
        scores="softmax", num_groups=groups[0], top_groups=groups[1], best_of_group=2, scale=read_scale(config, 1.0)
    )
    interleaved, growth = config.flag("rope_interleave", True), config.query_growth()
    plain = latent_decoder(
        config,
        experts,
        lambda _: gating,
        interleaved=interleaved,
        context=1_048_576,
        dense=0,
        shared=1,
        of_whole_head=True,
    )

    def branch(each: BranchSpec) -> BranchSpec:
        if isinstance(each.block, MoESpec):
            return replace(each, block=stored_together(each.block) if together else each.block)
        if not isinstance(each.block, LatentAttentionSpec):
            return each
        return replace(each, block=replace(each.block, query_growth=growth))

    return replace(plain, layers=tuple(layer.with_branches(branch) for layer in plain.layers))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    if values.integer("expert_gating_func", SOFTMAX) != SOFTMAX:
        raise values.unsupported("experts that are not chosen by a softmax")
    keys = latent_keys(values, "blk.0")
    return _decoder(GGUFConfig(values, **keys), together=values.has_in_layers("ffn_gate_up_exps.weight"))


FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
