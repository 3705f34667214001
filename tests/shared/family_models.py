"""Tiny random models of transformers' families: configurations, and how they are written to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 203
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
BLOOM = {"hidden_size": 64, "n_layer": 3, "n_head": 4}
NEOX = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
GPTJ = {"n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": 256, "rotary_dim": 16}
GEMMA2 = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "sliding_window": 24,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 12.0,
}
LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
ODD = {**LLAMA, "num_key_value_heads": 1, "head_dim": 24}
OPT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 96,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 64,
}
FALCON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256}
MPT = {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 256}
BIGCODE = {**GPT2, "tie_word_embeddings": False}
GEMMA3 = {
    **LLAMA,
    "num_hidden_layers": 6,
    "head_dim": 32,
    "sliding_window": 24,
    "query_pre_attn_scalar": 32,
}
GRANITE = {
    **LLAMA,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.5,
}
GEMMA4 = {
    **LLAMA,
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "head_dim": 32,
    "global_head_dim": 48,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 12.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "bloom": ("BloomForCausalLM", BLOOM),
    "gpt-neox": ("GPTNeoXForCausalLM", NEOX),
    "gptj": ("GPTJForCausalLM", GPTJ),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "opt": ("OPTForCausalLM", OPT),
    "falcon": ("FalconForCausalLM", FALCON),
    "gemma3": ("Gemma3ForCausalLM", GEMMA3),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4 of one kind of value": (
        "Gemma4ForCausalLM",
        {**GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gpt2 untied, relu, other scale": (
        "GPT2LMHeadModel",
        {
            **GPT2,
            "tie_word_embeddings": False,
            "activation_function": "relu",
            "scale_attn_by_inverse_layer_idx": True,
            "n_inner": 96,
        },
    ),
    "bloom with six heads": ("BloomForCausalLM", {**BLOOM, "hidden_size": 96, "n_head": 6}),
    "gpt-neox one after another": (
        "GPTNeoXForCausalLM",
        {**NEOX, "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
    ),
    "gptj all of a head": ("GPTJForCausalLM", {**GPTJ, "rotary_dim": 32}),
    "gemma2 without caps": (
        "Gemma2ForCausalLM",
        {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "opt with norms behind its blocks, and projections": (
        "OPTForCausalLM",
        {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 48},
    ),
    "opt without biases, gelu": ("OPTForCausalLM", {**OPT, "enable_bias": False, "activation_function": "gelu"}),
    "falcon with grouped queries and two norms": (
        "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon with grouped queries and one norm": (
        "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon with alibi, one after another": (
        "FalconForCausalLM",
        {
            **FALCON,
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "mpt": ("MptForCausalLM", {**MPT, "tie_word_embeddings": False}),
    "mpt with six heads": ("MptForCausalLM", {**MPT, "d_model": 96, "n_heads": 6, "tie_word_embeddings": False}),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", BIGCODE),
    "gpt-bigcode with all heads": ("GPTBigCodeForCausalLM", {**BIGCODE, "multi_query": False}),
    "gemma": ("GemmaForCausalLM", {**LLAMA, "head_dim": 32}),
    "gemma3 with a cap and scaling": (
        "Gemma3ForCausalLM",
        {
            **GEMMA3,
            "final_logit_softcapping": 12.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20_000.0},
            },
        },
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {**LLAMA, "num_hidden_layers": 4, "pad_token_id": 0, "tie_word_embeddings": False},
    ),
    "smollm3 with a window": (
        "SmolLM3ForCausalLM",
        {
            **LLAMA,
            "pad_token_id": 0,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
    "granite": ("GraniteForCausalLM", GRANITE),
    "granite with biases": ("GraniteForCausalLM", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "starcoder2": ("Starcoder2ForCausalLM", {**LLAMA, "sliding_window": 24}),
    "stablelm": ("StableLmForCausalLM", {**LLAMA, "use_qkv_bias": True}),
    "stablelm side by side": ("StableLmForCausalLM", {**LLAMA, "use_parallel_residual": True}),
    "stablelm with norms of heads": (
        "StableLmForCausalLM",
        {**LLAMA, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "phi": ("PhiForCausalLM", {**LLAMA, "num_key_value_heads": 4}),
    "phi with norms of heads": ("PhiForCausalLM", {**LLAMA, "qk_layernorm": True}),
    "phi with a tied head": ("PhiForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "cohere with norms of heads": ("CohereForCausalLM", {**LLAMA, "logit_scale": 1.5, "use_qk_norm": True}),
    "mpt with clipped values": (
        "MptForCausalLM",
        {**MPT, "tie_word_embeddings": False, "attn_config": {"clip_qkv": 0.5}},
    ),
    "olmoe with clipped values": (
        "OlmoeForCausalLM",
        {**LLAMA, "num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.5},
    ),
    "cohere": ("CohereForCausalLM", {**LLAMA, "logit_scale": 1.5}),
    "nemotron": ("NemotronForCausalLM", LLAMA),
    "phi3 with long contexts": (
        "Phi3ForCausalLM",
        {
            **LLAMA,
            "pad_token_id": 0,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 300,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0 + 0.2 * index for index in range(8)],
                "long_factor": [3.0] * 8,
            },
        },
    ),
}
ODD_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt with large projections": ("OPTForCausalLM", {**OPT, "num_attention_heads": 2, "word_embed_proj_dim": 96}),
    "falcon one after another": ("FalconForCausalLM", {**FALCON, "parallel_attn": False, "ffn_hidden_size": 100}),
    "falcon with one shared head": (
        "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 1, "bias": True},
    ),
    "falcon with six heads and alibi": (
        "FalconForCausalLM",
        {**FALCON, "hidden_size": 96, "num_attention_heads": 6, "alibi": True},
    ),
    "gpt-bigcode tied": ("GPTBigCodeForCausalLM", {**GPT2, "n_inner": 100}),
    "gemma": ("GemmaForCausalLM", ODD),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA2, "num_key_value_heads": 1, "head_dim": 24}),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA3, "num_key_value_heads": 1, "head_dim": 24, "attention_bias": True}),
    "smollm3": ("SmolLM3ForCausalLM", {**ODD, "pad_token_id": 0, "no_rope_layers": [0, 1, 0], "mlp_bias": True}),
    "olmo2": ("Olmo2ForCausalLM", {**LLAMA, "num_key_value_heads": 1, "attention_bias": True}),
    "granite": ("GraniteForCausalLM", {**GRANITE, "num_key_value_heads": 1}),
    "starcoder2": ("Starcoder2ForCausalLM", {**LLAMA, "num_key_value_heads": 1, "use_bias": False}),
    "stablelm": ("StableLmForCausalLM", {**LLAMA, "num_key_value_heads": 1, "partial_rotary_factor": 0.5}),
    "phi": ("PhiForCausalLM", {**LLAMA, "num_key_value_heads": 1, "partial_rotary_factor": 1.0}),
    "nemotron": ("NemotronForCausalLM", {**ODD, "partial_rotary_factor": 0.25, "mlp_bias": True}),
    "phi3": (
        "Phi3ForCausalLM",
        {**LLAMA, "num_key_value_heads": 1, "pad_token_id": 0, "partial_rotary_factor": 0.5, "sliding_window": 24},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", {**NEOX, "rotary_pct": 1.0, "tie_word_embeddings": True}),
    "llama": ("LlamaForCausalLM", {**ODD, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {**ODD, "sliding_window": 20}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {**ODD, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", ODD),
}
"""One key and value head, head sizes without a native kernel, all or little of a head rotated, and short windows."""


WINDOWED = {**LLAMA, "num_hidden_layers": 4, "sliding_window": 24}
NEW: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("Cohere2ForCausalLM", {**WINDOWED, "logit_scale": 1.5}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {**LLAMA, "head_dim": 24, "use_bias": True}),
    "exaone4": ("Exaone4ForCausalLM", WINDOWED),
    "gemma4": ("Gemma4ForCausalLM", {**GEMMA4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}),
    "glm4": ("Glm4ForCausalLM", {**LLAMA, "head_dim": 24, "pad_token_id": 0}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1ForCausalLM",
        {
            **LLAMA,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 10_000.0},
        },
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        {
            **LLAMA,
            "head_dim": 24,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "olmo3": ("Olmo3ForCausalLM", WINDOWED),
    "seed_oss": ("SeedOssForCausalLM", {**LLAMA, "head_dim": 24, "attention_out_bias": True}),
}
"""Families whose declarations are made of parts that the others above have."""


def write_model(
    name: str, overrides: dict[str, Any], folder: Path, vocab_size: int = VOCAB_SIZE, *, tied_experts: bool = False
) -> Any:
    """Write a model to a folder; with `tied_experts`, pairs of experts have equal logits."""
    model_class = getattr(transformers, name)
    config = model_class.config_class(vocab_size=vocab_size, initializer_range=0.3, **overrides)
    # torch's fused attention has no soft caps, and Falcon's own formula adds the part of ALiBi twice.
    config._attn_implementation = "sdpa" if name.startswith("Falcon") else "eager"
    torch.manual_seed(1)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.2)
            elif parameter.dim() == 1 or "norm" in parameter_name:
                parameter.normal_(0 if name.startswith(("Gemma2", "Gemma3", "GemmaF")) else 1, 0.2)
            elif tied_experts and parameter_name.endswith("gate.weight"):
                parameter[1::2] = parameter[: len(parameter) // 2 * 2 : 2]
        if not config.tie_word_embeddings:
            model.get_output_embeddings().weight.mul_(4)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
            elif buffer_name.endswith("layer_scalar"):
                buffer.normal_(1, 0.2)
    model.save_pretrained(folder)
    return model
