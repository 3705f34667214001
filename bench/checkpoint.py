"""Builds Hugging Face's `config.json` for a Llama whose weights a benchmark writes to a new folder."""

from __future__ import annotations

from typing import Any

from pagemill_models.spec.model_spec import ModelSpec


def llama_config(spec: ModelSpec) -> dict[str, Any]:
    (rope,), norm = spec.decoder.ropes(), spec.decoder.norm
    assert norm is not None
    return {
        "architectures": [spec.architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": rope.theta,
        "rms_norm_eps": norm.eps,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }
