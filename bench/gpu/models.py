"""Models with the shapes of three checkpoints and random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pagemill_engine.decoders.tensors import Shapes
from pagemill_engine.weights.floats import copy_floats
from pagemill_kernels.arrays import Array
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_models.spec.decoders import decoder_from_config
from pagemill_models.spec.model_spec import ModelSpec


def _spec(architecture: str, **config: Any) -> ModelSpec:
    """Return a model's spec; `config` has the keys of config.json."""
    return ModelSpec(decoder=decoder_from_config({"architectures": [architecture], **config}, Path("config.json")))


SPECS = {
    "qwen3-0.6b": _spec(
        "Qwen3ForCausalLM",
        num_hidden_layers=28,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
    ),
    "llama-3.2-1b": _spec(
        "LlamaForCausalLM",
        num_hidden_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": _spec(
        "LlamaForCausalLM",
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14_336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
    ),
}
TINY = _spec(
    "Qwen3ForCausalLM",
    num_hidden_layers=1,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=64,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
NUM_RANDOM = 1_000_003
"""A prime: rows of a repeated sequence of this length all differ."""


class RandomWeights:
    """A `TensorSource` of one repeated sequence of random numbers: drawing 8 billion would take minutes."""

    def __init__(self, spec: ModelSpec) -> None:
        self._numbers = np.random.default_rng(0).standard_normal(NUM_RANDOM, dtype=np.float32) * 0.02
        self.shapes: Shapes = spec.decoder.shapes()

    def read_into(self, name: str, out: Array) -> None:
        if out.ndim == 1:
            copy_floats(np.ones(out.shape, dtype=np.float32), out)
            return
        flat = out.reshape(-1)
        for start in range(0, len(flat), NUM_RANDOM):
            piece = flat[start : start + NUM_RANDOM]
            copy_floats(self._numbers[: len(piece)], piece)

    def read_codes(self, name: str) -> GroupCodes | None:
        return None

    def read_blocks(self, name: str) -> CodeBlocks | None:
        return None

    def is_bfloat16(self, name: str) -> bool:
        return False
