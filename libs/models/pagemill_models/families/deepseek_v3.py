"""DeepSeek-V3 (arXiv 2412.19437), R1, Kimi K2: V2 with sigmoid scores and a bias of choices. Its GGUF names
include V2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, GatingSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families import deepseek_v2
from pagemill_models.families.deepseek_v2 import SPLIT_UP, latent_decoder, read_groups, read_scale
from pagemill_models.families.llama_like import gguf_names
from pagemill_models.families.moe import GGUF_IN_LAYER, Mixture, mixture_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    renormalized = config.flag("norm_topk_prob", True)
    experts = mixture_from_config(config, size_key="moe_intermediate_size", renormalized=renormalized)
    gating = sigmoid_gating(config, experts, default=(8, 4), scale=2.5)
    interleaved = config.flag("rope_interleave", True)
    return latent_decoder(config, experts, gating, interleaved=interleaved, context=4096, dense=3, shared=1)


def sigmoid_gating(
    config: ConfigValues, experts: Mixture, default: tuple[int, int], scale: float
) -> Callable[[str], GatingSpec]:
    """Return a function from a mixture's name to its routing. `default`, `scale`: defaults of the class."""
    num_groups, top_groups = read_groups(config, experts, default=default)
    scale = read_scale(config, scale)
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

    return gating


def read_gguf(values: GGUFValues) -> DecoderSpec:
    """Declare a GGUF file's decoder, V2 or V3."""
    keys = latent_keys(values, "blk.0")
    is_sigmoid = values.integer("expert_gating_func", SOFTMAX) == SIGMOID
    by_groups = "group_limited_greedy" if keys["n_group"] > 1 else "greedy"
    config = GGUFConfig(values, **keys, topk_method=None if is_sigmoid else by_groups)
    return read_config(config) if is_sigmoid else deepseek_v2.read_config(config)


def latent_keys(values: GGUFValues, layer: str) -> dict[str, Any]:
    """Return what a GGUF file says of latent attention and experts, as keys of `config.json`. `layer`: prefix of one
    with such attention.

    Files older than key_length_mla have the heads' sizes under other keys, and `kv_b_proj` as a whole.
    """
    turning = values.size("qk_rope_head_dim", "rope.dimension_count")
    key_dim = values.integer("attention.key_length_mla", values.integer("attention.key_length", 192))
    return {
        "attention_bias": values.has(f"{layer}.attn_kv_a_mqa.bias"),
        "first_k_dense_replace": values.integer("leading_dense_block_count", 0),
        "kv_lora_rank": values.integer("attention.kv_lora_rank"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "n_group": values.integer("expert_group_count", 1),
        "n_routed_experts": values.integer("expert_count"),
        "n_shared_experts": values.integer("expert_shared_count", 1),
        "norm_topk_prob": values.flag("expert_weights_norm", False),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "q_lora_rank": values.integer("attention.q_lora_rank") if values.has(f"{layer}.attn_q_a.weight") else None,
        "qk_nope_head_dim": key_dim - turning,
        "qk_rope_head_dim": turning,
        "routed_scaling_factor": values.number("expert_weights_scale", 1.0),
        "topk_group": values.integer("expert_group_used_count", 1),
        "v_head_dim": values.integer("attention.value_length_mla", values.integer("attention.value_length", 128)),
        "head_dim": turning,
        SPLIT_UP: values.has(f"{layer}.attn_k_b.weight"),
    }


SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""
_NAMES = gguf_names(interleaved=False)
_IN_LAYER = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj.*",
    "attn_v_b": "self_attn.v_b_proj.*",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
SHARED_IN_LAYER = {name: each.replace("shared_expert.", "shared_experts.") for name, each in GGUF_IN_LAYER.items()}
GGUF_NAMES = _NAMES._replace(in_layer=_NAMES.in_layer | SHARED_IN_LAYER | _IN_LAYER)
FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
