"""Tiny random models with encoders, as transformers writes them: only their text part is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from family_models import GEMMA4, LLAMA, VOCAB_SIZE
from hybrid_models import EXPERTS
from hybrid_models import QWEN as HYBRID

TEXT = {**LLAMA, "vocab_size": VOCAB_SIZE, "initializer_range": 0.3}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
QWEN = {**TEXT, "head_dim": 16, "rope_parameters": ROPE}
GEMMA = {**TEXT, "num_hidden_layers": 6, "head_dim": 24, "sliding_window": 24, "query_pre_attn_scalar": 32}
MODELS: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {"text_config": GEMMA, "vision_config": VISION, "mm_tokens_per_image": 4},
    "Gemma4ForConditionalGeneration": {
        "text_config": {**GEMMA4, "num_kv_shared_layers": 3, "vocab_size": VOCAB_SIZE, "initializer_range": 0.3},
        "vision_config": {**VISION, "head_dim": 16, "position_embedding_size": 64},
        "audio_config": None,
    },
    "Gemma4UnifiedForConditionalGeneration": {
        "text_config": {
            **{key: each for key, each in GEMMA4.items() if not key.endswith("per_layer_input")},
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "vocab_size": VOCAB_SIZE,
            "initializer_range": 0.3,
        },
    },
    "Mistral3ForConditionalGeneration": {
        "text_config": {**TEXT, "model_type": "mistral", "head_dim": 24, "tie_word_embeddings": False},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
        "tie_word_embeddings": False,
    },
    "InternVLForConditionalGeneration": {"text_config": {**TEXT, "model_type": "qwen2"}, "vision_config": VISION},
    "Qwen2VLForConditionalGeneration": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {**QWEN_VISION, "embed_dim": 32},
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": {**TEXT, "num_key_value_heads": 1, "rope_parameters": ROPE},
        "vision_config": QWEN_VISION,
    },
    "Qwen3_5ForConditionalGeneration": {
        "text_config": {**HYBRID, "vocab_size": VOCAB_SIZE, "initializer_range": 0.3},
        "vision_config": QWEN_VISION,
    },
    "Qwen3_5MoeForConditionalGeneration": {
        "text_config": {**HYBRID, **EXPERTS, "vocab_size": VOCAB_SIZE, "initializer_range": 0.3},
        "vision_config": QWEN_VISION,
    },
    "Qwen3VLForConditionalGeneration": {"text_config": QWEN, "vision_config": QWEN_VISION},
    "Qwen3VLMoeForConditionalGeneration": {
        "text_config": {**QWEN, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
        "vision_config": QWEN_VISION,
    },
}


def write_multimodal(name: str, folder: Path) -> Any:
    model_class = getattr(transformers, name)
    config = model_class.config_class(**MODELS[name])
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.model.language_model.named_parameters():
            if parameter_name.endswith(("bias", "A_log")):
                parameter.normal_(-3 if parameter_name.endswith("A_log") else 0, 0.2)
            elif parameter.dim() == 1:
                parameter.normal_(0 if name.startswith("Gemma3") else 1, 0.2)
            elif parameter.dim() == 3:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model
