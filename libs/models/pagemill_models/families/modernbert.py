"""ModernBERT (arXiv 2412.13663): rotary positions, windows in most layers, norms before blocks, gated MLPs."""

from __future__ import annotations

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BranchSpec,
    ClassifierSpec,
    DecoderSpec,
    DenseSpec,
    EmbeddingSpec,
    LayerSpec,
    MLPSpec,
    ResidualSpec,
    RopeSpec,
)
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.parts import head_size, layer_norm, linear
from pagemill_protocol.request.pooling import PoolingMethod

_FULL, _SLIDING = "full_attention", "sliding_attention"
_THETAS = {_FULL: ("global_rope_theta", 160_000.0), _SLIDING: ("local_rope_theta", 10_000.0)}
"""The keys of files before transformers 5, and their defaults."""


def read_config(config: ConfigValues) -> DecoderSpec:
    size = config.size("hidden_size", default=768)
    vocab_size = config.size("vocab_size", default=50_368)
    num_layers = config.size("num_layers", "num_hidden_layers", default=22)
    eps, biased = config.epsilon("norm_eps", default=1e-5), config.flag("norm_bias", False)
    every = config.size("global_attn_every_n_layers", default=3)
    kinds = config.layer_types(num_layers) or [_SLIDING if index % every else _FULL for index in range(num_layers)]
    return DecoderSpec(
        architecture=config.architecture,
        hidden_size=size,
        vocab_size=vocab_size,
        max_position_embeddings=config.size("max_position_embeddings", default=8192),
        embedding=EmbeddingSpec(
            name="model.embeddings.tok_embeddings",
            num_rows=vocab_size,
            size=size,
            norm=layer_norm("model.embeddings.norm", size, eps, bias=biased),
        ),
        layers=tuple(_layer(config, index, kind, size) for index, kind in enumerate(kinds)),
        norm=layer_norm("model.final_norm", size, eps, bias=biased),
        head=None,
        classifier=_classifier(config, size, eps) if config.is_classifier else None,
        ignored_layers=("decoder.",) if config.is_classifier else ("decoder.", "head."),
        optional_prefix="model.",
    )


def _layer(config: ConfigValues, index: int, kind: str, size: int) -> LayerSpec:
    name = f"model.layers.{index}"
    eps, biased = config.epsilon("norm_eps", default=1e-5), config.flag("norm_bias", False)
    num_heads = config.size("num_heads", "num_attention_heads", default=12)
    inner = config.size("intermediate_size", default=1152)
    head_dim, attention_bias = head_size(size, num_heads), config.flag("attention_bias", False)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        qkv=linear(size, (f"{name}.attn.Wqkv", 3 * size), bias=attention_bias),
        output=linear(size, (f"{name}.attn.Wo", size), bias=attention_bias),
        scale=head_dim**-0.5,
        rope=_rope(config, kind, head_dim),
        window=config.size("local_attention", default=128) // 2 + 1 if kind == _SLIDING else None,
        causal=False,
    )
    mlp = MLPSpec(
        up=linear(size, (f"{name}.mlp.Wi", 2 * inner), bias=config.flag("mlp_bias", False)),
        down=linear(inner, (f"{name}.mlp.Wo", size), bias=config.flag("mlp_bias", False)),
        activation=config.activation("hidden_activation", default="gelu"),
        gated=True,
    )
    # The embedding's norm has already normalized the first layer's input.
    attention_norm = layer_norm(f"{name}.attn_norm", size, eps, bias=biased) if index else None
    mlp_norm = layer_norm(f"{name}.mlp_norm", size, eps, bias=biased)
    branches = [BranchSpec(block=attention, norm=attention_norm), BranchSpec(block=mlp, norm=mlp_norm)]
    return LayerSpec(name, tuple(ResidualSpec((branch,)) for branch in branches))


def _rope(config: ConfigValues, kind: str, head_dim: int) -> RopeSpec:
    if config.has("rope_parameters"):
        return config.rope(head_dim, config.size("max_position_embeddings", default=8192), kind=kind)
    key, default = _THETAS[kind]
    return RopeSpec(theta=config.number(key, default=default), rotary_dim=head_dim)


def _classifier(config: ConfigValues, size: int, eps: float) -> ClassifierSpec:
    dense = DenseSpec(
        linear=linear(size, ("head.dense", size), bias=config.flag("classifier_bias", False)),
        activation=config.activation("classifier_activation", default="gelu"),
        norm=layer_norm("head.norm", size, eps, bias=config.flag("norm_bias", False)),
    )
    labels = DenseSpec(linear=linear(size, ("classifier", config.num_labels), bias=True))
    method: PoolingMethod = "mean" if config.choice("classifier_pooling", ("cls", "mean")) == "mean" else "cls"
    return ClassifierSpec((dense, labels), method)


FAMILY = Family(read_config)
