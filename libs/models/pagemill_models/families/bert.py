"""BERT (arXiv 1810.04805): learned positions, token types, norms after each block. RoBERTa is declared from it."""

from __future__ import annotations

from functools import partial

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BranchSpec,
    ClassifierSpec,
    DecoderSpec,
    DenseSpec,
    EmbeddingSpec,
    LayerSpec,
    PositionsSpec,
    ResidualSpec,
    TokenTypesSpec,
)
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.parts import head_size, layer_norm, linear, plain_mlp

IGNORED = (".position_ids",)
"""Suffixes of constants that old checkpoints store."""


def read_config(config: ConfigValues) -> DecoderSpec:
    return encoder(config, "bert", _classifier(config) if config.is_classifier else None)


def encoder(
    config: ConfigValues, prefix: str, classifier: ClassifierSpec | None, *, position_offset: int = 0
) -> DecoderSpec:
    """Declare an encoder. `position_offset`: row of the first position."""
    _check(config)
    size, eps = config.size("hidden_size", default=768), config.epsilon("layer_norm_eps", default=1e-12)
    vocab_size = config.size("vocab_size", default=30_522)
    num_rows = config.size("max_position_embeddings", default=512)
    num_layers = config.size("num_layers", "num_hidden_layers", default=12)
    embeddings = f"{prefix}.embeddings"
    return DecoderSpec(
        architecture=config.architecture,
        hidden_size=size,
        vocab_size=vocab_size,
        max_position_embeddings=num_rows - position_offset,
        embedding=EmbeddingSpec(
            name=f"{embeddings}.word_embeddings",
            num_rows=vocab_size,
            size=size,
            positions=PositionsSpec(
                name=f"{embeddings}.position_embeddings", num_rows=num_rows, offset=position_offset
            ),
            token_types=TokenTypesSpec(
                name=f"{embeddings}.token_type_embeddings",
                num_rows=config.size("type_vocab_size", default=2),
            ),
            norm=layer_norm(f"{embeddings}.LayerNorm", size, eps),
        ),
        layers=tuple(_layer(config, f"{prefix}.encoder.layer.{index}", size, eps) for index in range(num_layers)),
        norm=None,
        head=None,
        classifier=classifier,
        ignored=IGNORED,
        ignored_layers=_unused(prefix, classifier),
        optional_prefix=f"{prefix}.",
    )


def _layer(config: ConfigValues, name: str, size: int, eps: float) -> LayerSpec:
    num_heads = config.size("num_heads", "num_attention_heads", default=12)
    inner = config.size("intermediate_size", default=3072)
    product = partial(linear, bias=True)
    parts = [(f"{name}.attention.self.{part}", size) for part in ("query", "key", "value")]
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_size(size, num_heads),
        qkv=product(size, *parts),
        output=product(size, (f"{name}.attention.output.dense", size)),
        scale=head_size(size, num_heads) ** -0.5,
        causal=False,
    )
    mlp = plain_mlp(
        product(size, (f"{name}.intermediate.dense", inner)),
        product(inner, (f"{name}.output.dense", size)),
        config.activation("hidden_act", default="gelu"),
    )
    norms = [layer_norm(f"{name}.{part}.LayerNorm", size, eps) for part in ("attention.output", "output")]
    branches = (BranchSpec(block=attention),), (BranchSpec(block=mlp),)
    return LayerSpec(name, tuple(map(ResidualSpec, branches, norms)))


def _classifier(config: ConfigValues) -> ClassifierSpec:
    """Return the classifier after the pooler, which is part of BERT's pretraining too."""
    size = config.size("hidden_size", default=768)
    pooler = DenseSpec(linear=linear(size, ("bert.pooler.dense", size), bias=True), activation="tanh")
    labels = DenseSpec(linear=linear(size, ("classifier", config.num_labels), bias=True))
    return ClassifierSpec((pooler, labels), "cls")


def _unused(prefix: str, classifier: ClassifierSpec | None) -> tuple[str, ...]:
    """Return the prefixes of pretraining heads that files may contain."""
    poolers = () if classifier is not None and prefix == "bert" else (f"{prefix}.pooler.", "pooler.")
    return (*poolers, "cls.", "lm_head.")


def _check(config: ConfigValues) -> None:
    if config.flag("is_decoder", False) or config.flag("add_cross_attention", False):
        raise config.unsupported("a causal mask (`is_decoder`)")
    kind = config.text("position_embedding_type", default="absolute")
    if kind != "absolute":
        raise config.unsupported(f"positions of the kind `{kind}`")


FAMILY = Family(read_config)
