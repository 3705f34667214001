"""EAGLE-3 heads of random weights, for models of `SIZE` values and `VOCAB` tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, OWN, SIZE, EPS = 257, 120, 64, 1e-5
"""`OWN`: tokens of a head's own vocabulary."""


def write_eagle3(folder: Path, **changes: Any) -> Path:
    """Write a head. `changes`: other values of its configuration, other tensors, and None for those that lack."""
    torch.manual_seed(2)
    inner, key = 96, 32
    tensors = {
        "fc.weight": torch.randn(SIZE, 3 * SIZE) * 0.1,
        "midlayer.hidden_norm.weight": torch.rand(SIZE) + 0.5,
        "midlayer.input_layernorm.weight": torch.rand(SIZE) + 0.5,
        "midlayer.post_attention_layernorm.weight": torch.rand(SIZE) + 0.5,
        "midlayer.self_attn.q_proj.weight": torch.randn(SIZE, 2 * SIZE) * 0.1,
        "midlayer.self_attn.k_proj.weight": torch.randn(key, 2 * SIZE) * 0.1,
        "midlayer.self_attn.v_proj.weight": torch.randn(key, 2 * SIZE) * 0.3,
        "midlayer.self_attn.o_proj.weight": torch.randn(SIZE, SIZE) * 0.3,
        "midlayer.mlp.gate_proj.weight": torch.randn(inner, SIZE) * 0.3,
        "midlayer.mlp.up_proj.weight": torch.randn(inner, SIZE) * 0.3,
        "midlayer.mlp.down_proj.weight": torch.randn(SIZE, inner) * 0.3,
        "norm.weight": torch.rand(SIZE) + 0.5,
        "lm_head.weight": torch.randn(OWN, SIZE) * 0.3,
        "d2t": torch.arange(OWN),
        "t2d": torch.arange(VOCAB) % 2 == 0,
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": SIZE,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "vocab_size": VOCAB, "draft_vocab_size": OWN, "max_position_embeddings": 256, "rms_norm_eps": EPS,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    for name in [each for each in tensors if changes.get(each, 0) is None]:
        del tensors[name]
    folder.mkdir(exist_ok=True)
    save_file(tensors | {n: v for n, v in changes.items() if isinstance(v, Tensor)}, folder / "model.safetensors")
    config |= {name: value for name, value in changes.items() if not isinstance(value, Tensor | None)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
