"""Tiny random models with mixtures of experts: configurations of transformers, and how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from family_models import GEMMA4, write_model
from greedy_families import Family, family_of

VOCAB_SIZE = 256
LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
QWEN = {**LLAMA, "head_dim": 16, "moe_intermediate_size": 40, "num_experts": 7, "num_experts_per_tok": 3}
GPT_OSS = {
    **LLAMA,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 24,
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
LATENT = {
    **LLAMA,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
        "original_max_position_embeddings": 64,
    },
}
DEEPSEEK_V2 = {**LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}
GLM = {
    **LLAMA,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
}
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 64,
}
NEW: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        {
            **LLAMA,
            "moe_intermediate_size": 40,
            "moe_num_experts": 7,
            "moe_k": 3,
            "moe_num_shared_experts": 1,
            "num_hidden_layers": 4,
            "moe_layer_interval": 2,
        },
    ),
    "glm4_moe": ("Glm4MoeForCausalLM", {**GLM, "use_qk_norm": True, "attention_bias": True, "head_dim": 24}),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        {**{key: each for key, each in LATENT.items() if key != "first_k_dense_replace"}, "n_shared_experts": 1},
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1ForCausalLM",
        {**LLAMA, "head_dim": 16, "num_experts": 6, "moe_topk": 2, "pad_token_id": 0},
    ),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        {**LLAMA, "head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "mistral4": ("Mistral4ForCausalLM", {**LATENT, "rope_parameters": GROWING}),
}
"""Families whose declarations are made of parts that the others above have."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", {**QWEN, "shared_expert_intermediate_size": 56, "decoder_sparse_step": 2}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**QWEN, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "gpt-oss": ("GptOssForCausalLM", GPT_OSS),
    "deepseek-v2": ("DeepseekV2ForCausalLM", DEEPSEEK_V2),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {**LATENT, "routed_scaling_factor": 1.5}),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4 with experts": (
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
    "mixtral, one expert a token": (
        "MixtralForCausalLM",
        {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 1, "sliding_window": 24},
    ),
    "mixtral, all experts": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 3}),
    "qwen2-moe, weights of 1, windows": (
        "Qwen2MoeForCausalLM",
        {
            **QWEN,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 2,
        },
    ),
    "qwen3-moe, shares of the whole softmax": ("Qwen3MoeForCausalLM", {**QWEN, "norm_topk_prob": False}),
    "deepseek-v2, no groups, whole queries": (
        "DeepseekV2ForCausalLM",
        {**DEEPSEEK_V2, "topk_method": "greedy", "q_lora_rank": None, "attention_bias": True, "rope_parameters": None},
    ),
    "deepseek-v3, one group, plain weights, halves that turn": (
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "first_k_dense_replace": 0,
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {**LLAMA, "num_experts": 6, "num_experts_per_tok": 2}),
}


def make_family(name: str, overrides: dict[str, Any], folder: Path, *, tied_experts: bool = False) -> Family:
    model = write_model(name, overrides, folder, VOCAB_SIZE, tied_experts=tied_experts)
    return family_of(model, folder, VOCAB_SIZE)
