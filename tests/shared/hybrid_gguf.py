"""What llama.cpp's converters write for hybrids: metadata keys and changes of tensors. `family_gguf` writes files."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Config = dict[str, Any]
ATTENTION = ("attention", "full_attention")
Change = Callable[[str, Tensor, Config], dict[str, Tensor]]


def hybrid_keys(config: Config, architecture: str) -> dict[str, Any]:
    """Return the metadata beside what all architectures have; nothing for other architectures."""
    if architecture in ("qwen35", "qwen35moe", "qwen3next"):
        return _qwen(config)
    if architecture == "granitehybrid":
        return _granite(config)
    if architecture == "falcon-h1":
        return _spaces(config) | {"attention.layer_norm_rms_epsilon": config["rms_norm_eps"]}
    if architecture.startswith("nemotron_h"):
        return _nemotron(config)
    return _kimi(config) if architecture == "kimi-linear" else {}


def _qwen(config: Config) -> dict[str, Any]:
    keys = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
        "rope.dimension_sections": [11, 11, 10, 0],
    }
    if "num_experts" in config:
        keys |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        }
    return keys


def _spaces(config: Config) -> dict[str, Any]:
    num_heads, size = config["mamba_n_heads"], config["mamba_d_head"]
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": num_heads,
        "ssm.inner_size": num_heads * size,
    }


def _granite(config: Config) -> dict[str, Any]:
    is_bamba = config["model_type"] == "bamba"
    kinds = config.get("layer_types") or [
        "attention" if index in config["attn_layer_indices"] else "mamba"
        for index in range(config["num_hidden_layers"])
    ]
    heads = [config["num_key_value_heads"] * (kind in ATTENTION) for kind in kinds]
    keys = _spaces(config) | {"attention.head_count_kv": heads, "rope.scaling.finetuned": is_bamba}
    if is_bamba:
        return keys
    experts = config["num_local_experts"]
    keys |= {"expert_count": experts, "expert_shared_feed_forward_length": config["shared_intermediate_size"]}
    return keys | ({"expert_used_count": config["num_experts_per_tok"]} if experts else {})


def _nemotron(config: Config) -> dict[str, Any]:
    kinds = config["layers_block_type"]
    width = config["moe_intermediate_size"] if "moe" in kinds else config["intermediate_size"]
    num_heads = config["mamba_num_heads"]
    keys: dict[str, Any] = {
        "block_count": len(kinds),
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind in ATTENTION) for kind in kinds],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "feed_forward_length": [width * (kind in ("mlp", "moe")) for kind in kinds],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.time_step_rank": num_heads,
        "ssm.inner_size": num_heads * config["mamba_head_dim"],
    }
    if "moe" in kinds:
        keys |= {
            "expert_count": config["n_routed_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_shared_count": 1,
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
        }
        if config.get("moe_latent_size"):
            keys["moe_latent_size"] = config["moe_latent_size"]
    return keys


def _kimi(config: Config) -> dict[str, Any]:
    turning, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    keys = {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config["layer_types"]],
        "attention.key_length": latent + turning,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turning,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": latent,
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_token"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_gating_func": 2,
        "expert_group_count": config["num_expert_group"],
        "expert_group_used_count": config["topk_group"],
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "kda.head_dim": config["linear_head_dim"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "rope.dimension_count": turning,
    }
    return keys | ({"attention.q_lora_rank": config["q_lora_rank"]} if config.get("q_lora_rank") else {})


def _of_rule(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name.endswith(".A_log"):
        return {name: -tensor.exp()}
    if name.endswith(".dt_bias"):
        return {name.replace(".dt_bias", ".dt_proj.bias"): tensor}
    return {name: tensor.squeeze() if "conv1d.weight" in name else tensor}


_OF_HEAD = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}


def _qwen_next(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    if name.startswith("mtp.layers.0."):
        name = f"model.layers.{config['num_hidden_layers']}.{name.removeprefix('mtp.layers.0.')}"
    elif name.startswith("mtp."):
        part = _OF_HEAD[name.split(".")[1]]
        return {f"blk.{config['num_hidden_layers']}.nextn.{part}.weight": tensor + (1 if "norm" in part else 0)}
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return {name: tensor + 1}
    if "shared_expert_gate" in name:
        return {name: tensor.squeeze()}
    if "in_proj_qkvz" not in name:
        return _of_rule(name, tensor)
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, of_key = config["linear_key_head_dim"], values // keys * config["linear_value_head_dim"]
    rows = tensor.view(keys, -1, tensor.shape[1]).split([key_dim, key_dim, of_key, of_key], dim=1)
    query, key, value, gate = (each.reshape(-1, tensor.shape[1]) for each in rows)
    layer = f"blk.{name.split('.')[2]}"
    return {f"{layer}.attn_qkv.weight": torch.cat([query, key, value]), f"{layer}.attn_gate.weight": gate}


def tiled(tensor: Tensor, dimension: int, config: Config, *, whole: bool) -> Tensor:
    """Return the tensor with the first value heads of all key heads before the second ones."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"] if whole else 1
    before, of_heads = tensor.split([tensor.shape[dimension] - values * size, values * size], dim=dimension)
    turned = of_heads.unflatten(dimension, (keys, values // keys, size)).transpose(dimension, dimension + 1)
    return torch.cat([before, turned.flatten(dimension, dimension + 2)], dim=dimension)


def _qwen_tiled(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    part = re.sub(r".*linear_attn\.", "", name)
    if part.startswith(("in_proj_qkv.", "in_proj_z.", "conv1d.")):
        tensor = tiled(tensor, 0, config, whole=True)
    elif part.startswith(("in_proj_a.", "in_proj_b.", "A_log", "dt_bias")):
        tensor = tiled(tensor, 0, config, whole=False)
    elif part.startswith("out_proj."):
        tensor = tiled(tensor, 1, config, whole=True)
    return _qwen_next(name, tensor, config)


def rotary_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Return the rows with value i of a head next to the one that is rotated with it."""
    return rows.view(num_heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _space(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    num_groups = config.get("mamba_n_groups") or config["n_groups"]
    if name.endswith((".A_log", ".D")):
        tensor = tensor.reshape(-1, 1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        tensor = tensor.reshape(num_groups, -1)
    if name.endswith("e_score_correction_bias"):
        return {name.replace("correction_bias", "correction.bias"): tensor}
    return _of_rule(name, tensor)


def _granite_tensors(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    shared = "_shexp" if config.get("num_local_experts") else ""
    stacked = {"shared_mlp.input_linear": shared, "block_sparse_moe.input_linear": "_exps"}
    for part, suffix in stacked.items():
        if part in name:
            gate, up = tensor.chunk(2, dim=-2)
            return {f"{layer}.ffn_gate{suffix}.weight": gate, f"{layer}.ffn_up{suffix}.weight": up}
    for part, suffix in (("shared_mlp.output_linear", shared), ("block_sparse_moe.output_linear", "_exps")):
        if part in name:
            return {f"{layer}.ffn_down{suffix}.weight": tensor}
    if "router.layer" in name:
        return {f"{layer}.ffn_gate_inp.weight": tensor}
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = next((key for part, key in heads.items() if part in name), None)
    return {name: rotary_pairs(tensor, config[key])} if key is not None else _space(name, tensor, config)


def _nemotron_tensors(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    if ".mixer.experts." in name:
        return {name.replace("backbone.", "model.").replace(".mixer.", ".mlp."): tensor}
    return _granite_tensors(name, tensor, config)


def _falcon(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    before, gate, down = config["attention_in_multiplier"], *config["mlp_multipliers"]
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config["key_multiplier"] * before,
        "q_proj": before,
        "v_proj": before,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    if "in_proj" in name:
        inner, of_groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = torch.tensor([inner, inner, of_groups, of_groups, config["mamba_n_heads"]])
        scales = torch.tensor(config["ssm_multipliers"]).repeat_interleave(sizes)
        tensor = tensor * config["ssm_in_multiplier"] * scales[:, None]
    factor = next((factor for part, factor in factors.items() if f".{part}." in f".{name}"), 1.0)
    return _space(name, tensor * factor, config)


def _kimi_tensors(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    name = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name)
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    experts = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
    shared = {f"shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
    parts = (
        {f"experts.{part}.": short for part, short in experts.items()} | shared | {"moe.gate.weight": "ffn_gate_inp"}
    )
    for part, short in parts.items():
        if part in name:
            return {f"{layer}.{short}.weight": tensor}
    if name.endswith("e_score_correction_bias"):
        return {f"{layer}.exp_probs_b.bias": tensor}
    if "conv1d.weight" in name:
        return {name: tensor.reshape(1, -1, 1, tensor.shape[-1])}
    if "kv_b_proj" in name:
        by_head = tensor.view(config["num_attention_heads"], -1, tensor.shape[1])
        keys, values = by_head.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
        return {name.replace("kv_b", "k_b"): keys.transpose(1, 2), name.replace("kv_b", "v_b"): values}
    return _of_rule(name, tensor)


HYBRID_CHANGES: dict[str, Change] = {
    "qwen35": _qwen_tiled,
    "qwen35moe": _qwen_tiled,
    "qwen3next": _qwen_next,
    "granitehybrid": _granite_tensors,
    "falcon-h1": _falcon,
    "nemotron_h": _nemotron_tensors,
    "nemotron_h_moe": _nemotron_tensors,
    "kimi-linear": _kimi_tensors,
}
