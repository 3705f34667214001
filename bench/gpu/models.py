"""Models with the shapes of published checkpoints and random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pagemill_execution.decoders.tensors import Shapes
from pagemill_execution.weights.floats import copy_floats
from pagemill_kernels.arrays import Array
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_models.spec.decoders import decoder_from_config
from pagemill_models.spec.model_spec import ModelSpec

HYBRID: dict[str, Any] = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_attention_heads": 16,
    "head_dim": 256,
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""What Qwen3.5 and Qwen3.6 have in common."""
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3.5-9b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_key_value_heads": 4,
        **HYBRID,
    },
    "qwen3.6-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 2,
        **HYBRID,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
        "rope_theta": 150_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}
"""config.json of published models, and of one that is small enough for the interpreter."""
SMALL_STATES = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 2,
}
SMALL: dict[str, dict[str, int]] = {
    "qwen3.5-9b": SMALL_STATES,
    "qwen3.6-35b-a3b": {
        **SMALL_STATES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3-30b-a3b": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt-oss-20b": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}
"""What else is small in the tiny form of a hybrid or a mixture of experts."""


def config_of(name: str, num_layers: int | None = None, *, tiny: bool = False) -> dict[str, Any]:
    """Return a model's config.json: with fewer layers, or in the sizes of the tiny model."""
    config = dict(CONFIGS[name])
    if tiny:
        sizes = {key: value for key, value in CONFIGS["tiny"].items() if key not in ("architectures", "model_type")}
        return config | sizes | SMALL.get(name, {})
    return config | ({} if num_layers is None else {"num_hidden_layers": num_layers})


def spec_of(name: str, num_layers: int | None = None, *, tiny: bool = False) -> ModelSpec:
    return ModelSpec(decoder=decoder_from_config(config_of(name, num_layers, tiny=tiny), Path("config.json")))


TINY = spec_of("tiny")
NUM_RANDOM = 1_000_003
"""A prime: rows of a repeated sequence of this length all differ."""


def random_numbers() -> Array:
    return np.random.default_rng(0).standard_normal(NUM_RANDOM, dtype=np.float32) * 0.02


class RandomWeights:
    """A `TensorSource` of one repeated sequence of random numbers: drawing 8 billion would take minutes."""

    def __init__(self, spec: ModelSpec) -> None:
        self._numbers = {np.dtype(np.float32): random_numbers()}
        self.shapes: Shapes = spec.decoder.shapes()

    def read_into(self, name: str, out: Array) -> None:
        if out.ndim == 1:
            copy_floats(np.ones(out.shape, dtype=np.float32), out)
            return
        numbers = self._numbers.get(out.dtype)
        if numbers is None:  # rounded once for each type: every tensor would take as long again
            numbers = self._numbers[out.dtype] = np.empty(NUM_RANDOM, out.dtype)
            copy_floats(random_numbers(), numbers)
        flat = out.reshape(-1)
        for start in range(0, len(flat), NUM_RANDOM):
            piece = flat[start : start + NUM_RANDOM]
            np.copyto(piece, numbers[: len(piece)])

    def read_codes(self, name: str) -> GroupCodes | None:
        return None

    def read_blocks(self, name: str) -> CodeBlocks | None:
        return None

    def is_bfloat16(self, name: str) -> bool:
        return False
