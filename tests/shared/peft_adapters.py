"""Adapters that PEFT makes, saves and computes: the reference of those that engines serve."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
import transformers

VOCAB_SIZE = 256
_LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
_MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA),
    "llama tied": ("Llama", {**_LLAMA, "tie_word_embeddings": True}),
    "llama of one layer": ("Llama", {**_LLAMA, "num_hidden_layers": 1}),
    "mixtral of one layer": ("Mixtral", {**_LLAMA, **_MIXTURE, "num_hidden_layers": 1}),
    "gpt2": ("GPT2", {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256,
                      "initializer_range": 0.3}),
    "phi3": ("Phi3", {**_LLAMA, "pad_token_id": 0}),
    "gpt_neox": ("GPTNeoX", {**_LLAMA, "rotary_pct": 0.5}),
    "mixtral": ("Mixtral", {**_LLAMA, **_MIXTURE}),
    "qwen3_moe": ("Qwen3Moe", {**_LLAMA, **_MIXTURE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2Moe", {**_LLAMA, **_MIXTURE, "shared_expert_intermediate_size": 48}),
    "gpt_oss": ("GptOss", {**_LLAMA, **_MIXTURE, "head_dim": 16}),
    "deepseek_v3": ("DeepseekV3", {
        **_LLAMA, "num_hidden_layers": 2, "num_key_value_heads": 4, "moe_intermediate_size": 40, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    }),
}  # fmt: skip
PROMPTS = [[(7 * index + 11 * position * position) % VOCAB_SIZE for position in range(12)] for index in range(32)]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}),
    "llama, all-linear and rslora": (
        "llama", {"target_modules": "all-linear", "use_rslora": True, "r": 4, "lora_alpha": 4},
    ),
    "llama, patterns": (
        "llama",
        {
            "target_modules": r".*\.(q_proj|down_proj|up_proj)",
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 4, "down_proj": 16},
            "alpha_pattern": {"up_proj": 4},
        },
    ),
    "llama, some layers": ("llama", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 2]}),
    "llama, ends of names": (
        "llama",
        {
            "target_modules": ["self_attn.q_proj", "layers.1.mlp.up_proj", "down_proj"],
            "exclude_modules": ["layers.0.mlp.down_proj"],
        },
    ),
    "llama, layers of a list": (
        "llama", {"target_modules": ["o_proj", "up_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    ),
    "llama, embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "llama, tied head": ("llama tied", {"target_modules": ["embed_tokens", "k_proj"]}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2, embedding": ("gpt2", {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True}),
    "phi3": ("phi3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "gpt_neox": ("gpt_neox", {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]}),
    "mixtral": (
        "mixtral",
        {
            "target_modules": ATTENTION,
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]},
    ),
    "qwen3_moe, one parameter": (
        "qwen3_moe", {"target_modules": ["k_proj"], "target_parameters": ["experts.gate_up_proj"]},
    ),
    "qwen2_moe, all-linear": ("qwen2_moe", {"target_modules": "all-linear"}),
    "gpt_oss": (
        "gpt_oss",
        {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "experts.gate_up_proj"]},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "down_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj"],
        },
    ),
}  # fmt: skip


class Base(NamedTuple):
    folder: Path
    model: Any
    """The plain model, float32."""


def write_base(name: str, folder: Path) -> Base:
    kind, settings = MODELS[name]
    torch.manual_seed(1)
    made = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, made)(getattr(transformers, f"{kind}Config")(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    model.save_pretrained(folder)
    return Base(folder, model)


class Adapted(NamedTuple):
    folder: Path
    model: Any
    """PEFT's model, which computes the adapter beside the base."""

    @torch.no_grad()
    def greedy(self, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
        """Return the continuation, and the smallest difference of two best log probabilities."""
        ids, least = torch.tensor([prompt]), float("inf")
        for _ in range(num_tokens):
            best = self.model(ids, use_cache=False).logits[0, -1].log_softmax(-1).topk(2)
            least = min(least, float(best.values[0] - best.values[1]))
            ids = torch.cat((ids, best.indices[None, :1]), dim=1)
        return ids[0, len(prompt) :].tolist(), least


def write_adapter(base: Base, folder: Path, seed: int = 0, size: float = 0.2, **settings: Any) -> Adapted:
    """Write an adapter with random A and B, whose values are those of bfloat16."""
    model = getattr(transformers, type(base.model).__name__).from_pretrained(base.folder, dtype=torch.float32).eval()
    config = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 8, "lora_alpha": 16, **settings})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config).eval()
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_((torch.randn_like(parameter) * size).bfloat16().float())
        adapted.save_pretrained(folder)
    return Adapted(folder, adapted)
