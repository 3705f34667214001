"""A Llama of two layers with random weights, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


def write_tiny_llama(folder: Path, **overrides: Any) -> Path:
    """Write a model with fixed weights and `overrides` of `LlamaConfig`; return `folder`."""
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "dtype": "float32",
        **overrides,
    }
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).save_pretrained(folder)
    return folder
