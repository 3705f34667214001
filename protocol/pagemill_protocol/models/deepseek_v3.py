"""DeepSeek-V3 (arXiv 2412.19437), R1 and others of its shape: DeepSeek-V2 with sigmoid scores and a bias of choices."""

from __future__ import annotations

from pagemill_protocol.models.config_values import ConfigValues
from pagemill_protocol.models.declaration import DecoderSpec, GatingSpec
from pagemill_protocol.models.deepseek_v2 import latent_decoder, read_groups, read_scale
from pagemill_protocol.models.family import Family
from pagemill_protocol.models.moe import mixture_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    renormalized = config.flag("norm_topk_prob", True)
    experts = mixture_from_config(config, size_key="moe_intermediate_size", renormalized=renormalized)
    num_groups, top_groups = read_groups(config, experts, default=(8, 4))
    scale = read_scale(config, 2.5)
    if num_groups > 1 and experts.num_experts // num_groups < 2:
        raise config.wrong("n_group", num_groups, "of groups with two experts or more")

    def gating(name: str) -> GatingSpec:
        return GatingSpec(
            scores="sigmoid",
            num_groups=num_groups,
            top_groups=top_groups,
            best_of_group=2,
            bias=f"{name}.gate.e_score_correction_bias",
            scale=scale,
        )

    interleaved = config.flag("rope_interleave", True)
    return latent_decoder(config, experts, gating, interleaved=interleaved, context=4096, dense=3, shared=1)


FAMILY = Family(read_config)
