"""What llama.cpp's converters write for newer families with experts: metadata keys and changes of tensors."""

from __future__ import annotations

from typing import Any

import torch
from hybrid_gguf import Change, Config, rotary_pairs
from torch import Tensor

_KEYS = {
    "expert_count": ("n_routed_experts", "moe_num_experts", "num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval",),
}


def sparse_keys(config: Config, architecture: str) -> dict[str, Any]:
    """Return the metadata beside what all architectures have."""
    found = {key: next((config[name] for name in names if config.get(name) is not None), None)
             for key, names in _KEYS.items()}  # fmt: skip
    keys = {key: value for key, value in found.items() if value is not None}
    if architecture == "hunyuan-moe":
        keys["expert_shared_feed_forward_length"] = config["intermediate_size"]
    if architecture == "glm4moe":
        keys["expert_gating_func"] = 2
    return keys


def yarn_keys(rope: Config, divisor: float) -> dict[str, Any]:
    """Return what converters write of a YaRN. `divisor`: of the logarithm's multiplier."""
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }
    multiplier = rope.get("mscale_all_dim")
    return keys | ({} if multiplier is None else {"rope.scaling.yarn_log_multiplier": multiplier / divisor})


def _plain(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    """Rename what the tables of names have otherwise."""
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith("e_score_correction_bias"):
        return {f"{layer}.exp_probs_b.bias": tensor.reshape(-1)}
    experts = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    for part, short in experts.items():
        if f".experts.{part}." in name:
            return {f"{layer}.ffn_{short}_exps.weight": tensor}
        if f".shared_mlp.{part}." in name:
            return {f"{layer}.ffn_{short}_shexp.weight": tensor}
    return {f"{layer}.ffn_gate_inp.weight": tensor} if name.endswith(".gate.wg.weight") else {name: tensor}


def _mistral(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = next((key for part, key in heads.items() if part in name), None)
    return {name: tensor if key is None else rotary_pairs(tensor, config[key])}


def gemma4_keys(config: Config) -> dict[str, Any]:
    kinds, shared, width = config["layer_types"], config["num_kv_shared_layers"], config["intermediate_size"]
    full = next(iter(config["per_layer_config"].values()))
    own, heads = len(kinds) - shared, config["num_key_value_heads"]
    is_wide = config["use_double_wide_mlp"]
    keys: dict[str, Any] = {
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "attention.shared_kv_layers": shared,
        "attention.head_count_kv": [
            heads if kind == "sliding_attention" else full.get("num_key_value_heads", heads) for kind in kinds
        ],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "feed_forward_length": [width * (2 if is_wide and index >= own else 1) for index in range(len(kinds))],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
    }
    if config["enable_moe_block"]:
        keys |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["top_k_experts"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return keys


def gemma4_divisors(config: Config) -> Tensor:
    """Return those of full attention: values that are not rotated have a huge one."""
    half = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
    rotated = int(half * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    return torch.tensor([1.0] * rotated + [1e30] * (half - rotated))


def _gemma4(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    others = {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    }
    short = next((short for ending, short in others.items() if name.endswith(ending)), None)
    return {name if short is None else f"{layer}.{short}": tensor}


SPARSE_CHANGES: dict[str, Change] = {
    "ernie4_5-moe": _plain,
    "gemma4": _gemma4,
    "glm4moe": _plain,
    "hunyuan-moe": _plain,
    "minimax-m2": _plain,
    "mistral3": _mistral,
}
