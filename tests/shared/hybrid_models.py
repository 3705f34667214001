"""Tiny random hybrids of transformers' classes: attention beside layers with a recurrent state, with odd shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from family_models import VOCAB_SIZE, write_model
from safetensors.torch import load_file, save_file

LENGTHS = (1, 2, 15, 16, 17, 33, 90, 200)
QWEN = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}
EXPERTS = {
    "moe_intermediate_size": 40,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 24,
}
LFM2 = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "block_multiple_of": 20,
    "max_position_embeddings": 256,
    "full_attn_idxs": [1, 3],
}
LAYERS = ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5ForCausalLM", QWEN),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", {**QWEN, **EXPERTS, "linear_conv_kernel_dim": 4}),
    "qwen3-next": ("Qwen3NextForCausalLM", {**QWEN, **EXPERTS, "decoder_sparse_step": 2}),
}
SHORT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2ForCausalLM", LFM2),
    "lfm2 with biases, a kernel of four, untied": (
        "Lfm2ForCausalLM",
        {
            **LFM2,
            "conv_bias": True,
            "conv_L_cache": 4,
            "tie_word_embeddings": False,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_ffn_dim_multiplier": 1.3,
        },
    ),
}
MAMBA = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 13,
    "head_dim": 32,
}
STATE_SPACES: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("BambaForCausalLM", {**MAMBA, "attn_layer_indices": [1, 2]}),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        {
            **MAMBA,
            "mamba_d_ssm": 96,
            "num_hidden_layers": 2,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.4,
            "mlp_multipliers": [0.6, 1.7],
            "key_multiplier": 0.5,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.6],
            "ssm_in_multiplier": 1.4,
            "ssm_out_multiplier": 0.9,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "shared_intermediate_size": 24,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.5,
        },
    ),
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Of classes whose own defaults are larger than the vocabulary."""
LFM2_MOE = {
    **LFM2,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "num_dense_layers": 1,
    "moe_intermediate_size": 40,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
LFM3 = {
    **{key: LFM2[key] for key in LFM2 if key not in ("block_multiple_of", "full_attn_idxs")},
    **SPECIAL,
    "num_hidden_layers": 6,
    "head_dim": 32,
    "sliding_window": 20,
    "tie_word_embeddings": False,
}
OLMO = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    **SPECIAL,
}
NEMOTRON = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "layers_block_type": ["mamba", "attention", "mlp", "moe", "mamba", "attention"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 10,
    "conv_kernel": 3,
    "chunk_size": 13,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 1.4,
}
KIMI = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 40,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_head_dim": 12,
    "linear_num_heads": 3,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    **SPECIAL,
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2-moe": ("Lfm2MoeForCausalLM", LFM2_MOE),
    "lfm3": ("Lfm3ForCausalLM", LFM3),
    "olmo-hybrid": ("OlmoHybridForCausalLM", OLMO),
    "nemotron-h": ("NemotronHForCausalLM", NEMOTRON),
    "kimi-linear": ("KimiLinearForCausalLM", KIMI),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5 with a kernel of two, all of a head rotated, tied": (
        "Qwen3_5ForCausalLM",
        {
            **QWEN,
            "linear_conv_kernel_dim": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    "qwen3.5 with another pattern, one key head, biases": (
        "Qwen3_5ForCausalLM",
        {
            **QWEN,
            "num_hidden_layers": 5,
            "layer_types": LAYERS,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
        },
    ),
    "qwen3.5 with attention alone": ("Qwen3_5ForCausalLM", {**QWEN, "layer_types": ["full_attention"] * 4}),
    "qwen3.5 with heads of 256": (
        "Qwen3_5ForCausalLM",
        {**QWEN, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "linear_num_value_heads": 2},
    ),
    "qwen3-next with some plain MLPs": (
        "Qwen3NextForCausalLM",
        {**QWEN, **EXPERTS, "mlp_only_layers": [1, 2], "norm_topk_prob": False},
    ),
}


VARIANTS |= {
    "falcon-h1 with norms by group behind the gates, biases": (
        "FalconH1ForCausalLM",
        {
            **STATE_SPACES["falcon-h1"][1],
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mamba_d_conv": 2,
        },
    ),
    "falcon-h1 with norms before the gates": (
        "FalconH1ForCausalLM",
        {**STATE_SPACES["falcon-h1"][1], "mamba_rms_norm": True, "mamba_conv_bias": False},
    ),
    "granitemoehybrid without experts, rotated, tied": (
        "GraniteMoeHybridForCausalLM",
        {
            **STATE_SPACES["granitemoehybrid"][1],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
            "time_step_limit": [0.3, 1.5],
        },
    ),
    "bamba with biases, a kernel of four": (
        "BambaForCausalLM",
        {
            **STATE_SPACES["bamba"][1],
            "mamba_d_conv": 4,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
}


VARIANTS |= {
    "lfm2-moe without a bias of choices, biases, one dense layer more": (
        "Lfm2MoeForCausalLM",
        {
            **LFM2_MOE,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "conv_bias": True,
            "conv_L_cache": 4,
            "num_dense_layers": 2,
        },
    ),
    "lfm3 without gates and norms behind blocks, heads of 24, other bases": (
        "Lfm3ForCausalLM",
        {
            **LFM3,
            "head_dim": 24,
            "use_attention_gate": False,
            "use_sandwich_norm": False,
            "attention_bias": True,
            "conv_L_cache": 3,
            "layer_types": ["sliding_attention", "conv", "full_attention", "conv", "sliding_attention", "conv"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "default", "rope_theta": 20_000.0},
            },
        },
    ),
    "olmo-hybrid without a rotation, rates up to one, one key head, biases": (
        "OlmoHybridForCausalLM",
        {
            **OLMO,
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
            "linear_allow_neg_eigval": False,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 2,
            "attention_bias": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "nemotron-h with biases, groups of experts, heads of 24, limits of steps": (
        "NemotronHForCausalLM",
        {
            **NEMOTRON,
            "head_dim": 24,
            "n_group": 3,
            "topk_group": 2,
            "use_bias": True,
            "mlp_bias": False,
            "attention_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 4,
            "norm_topk_prob": False,
            "time_step_min": 0.3,
            "layers_block_type": ["attention", "moe", "mamba", "mamba", "moe", "mlp"],
        },
    ),
    "nemotron-h with experts over latents": (
        "NemotronHForCausalLM",
        {**NEMOTRON, "moe_latent_size": 32, "mlp_bias": True},
    ),
    "kimi-linear with compressed queries, two shared experts, dense layers": (
        "KimiLinearForCausalLM",
        {
            **KIMI,
            "q_lora_rank": 20,
            "n_shared_experts": 2,
            "moe_renormalize": False,
            "linear_num_heads": 2,
            "linear_head_dim": 20,
            "linear_conv_kernel_dim": 4,
            "layer_types": None,
            "num_hidden_layers": 5,
            "kv_lora_rank": 72,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
        },
    ),
}


ALL = MODELS | SHORT | STATE_SPACES | OTHERS
"""At least one shape of each family."""


def write_hybrid(name: str, overrides: dict[str, Any], folder: Path, vocab_size: int = VOCAB_SIZE) -> Any:
    """Write a model whose states remember many tokens."""
    model = write_model(name, overrides, folder, vocab_size)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.normal_(-3, 1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("expert_bias"):
                buffer.normal_(0, 0.2)
    model.save_pretrained(folder)
    if name == "OlmoHybridForCausalLM":
        _divide_convolutions(folder, model.config)
    return model


def _divide_convolutions(folder: Path, config: Any) -> None:
    """Store a convolution for queries, keys and values each, as published files have them; transformers divides their
    channels equally when it saves."""
    path, names = folder / "model.safetensors", [f"{part}_conv1d.weight" for part in "qkv"]
    of_keys, of_values = (
        getattr(config, f"linear_num_{part}_heads") * getattr(config, f"linear_{part}_head_dim")
        for part in ("key", "value")
    )
    tensors = load_file(path)
    for prefix in {name.removesuffix(names[0]) for name in tensors if name.endswith(names[0])}:
        whole = torch.cat([tensors[prefix + name] for name in names])
        for name, part in zip(names, torch.split(whole, [of_keys, of_keys, of_values]), strict=True):
            tensors[prefix + name] = part.contiguous()
    save_file(tensors, path, {"format": "pt"})


@torch.no_grad()
def check_greedy(model: Any, prompt: list[int], answer: list[int]) -> None:
    """Compare an answer with the reference's greedy one: the whole sequence is computed at once, without a cache.
    If each token is the best one behind those before, the answer is that of the greedy reference."""
    logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    assert answer == logits.argmax(-1).tolist()
    best = logits.log_softmax(-1).topk(2).values
    assert float((best[:, 0] - best[:, 1]).median()) > 0.3, "the two best tokens differ too little to compare"


def prompts_of(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
