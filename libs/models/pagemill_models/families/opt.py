"""OPT (arXiv 2205.01068): learned positions with an offset of 2; 350m has norms after blocks, and projections."""

from __future__ import annotations

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    LinearSpec,
    NormSpec,
    PositionsSpec,
    ResidualSpec,
)
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.parts import head_size, layer_norm, linear, plain_mlp

EPS = 1e-5
DECODER = "model.decoder"


def read_config(config: ConfigValues) -> DecoderSpec:
    if not config.flag("layer_norm_elementwise_affine", True):
        raise config.unsupported("layer norms without weights")
    size, vocab_size = config.size("hidden_size", default=768), config.size("vocab_size", default=50_272)
    context = config.size("max_position_embeddings", default=2048)
    row_size = config.size("hidden_size", "word_embed_proj_dim", default=size)
    norms_first = config.flag("do_layer_norm_before", True)
    has_norm = norms_first and not config.flag("_remove_final_layer_norm", False)
    return DecoderSpec(
        architecture=config.architecture,
        hidden_size=size,
        vocab_size=vocab_size,
        max_position_embeddings=context,
        embedding=EmbeddingSpec(
            name=f"{DECODER}.embed_tokens",
            num_rows=vocab_size,
            size=row_size,
            projection=_projection("project_in", row_size, size),
            positions=PositionsSpec(name=f"{DECODER}.embed_positions", num_rows=context + 2, offset=2),
        ),
        layers=tuple(
            _layer(config, f"{DECODER}.layers.{index}", size, norms_first)
            for index in range(config.size("num_layers", "num_hidden_layers", default=12))
        ),
        norm=layer_norm(f"{DECODER}.final_layer_norm", size, EPS) if has_norm else None,
        head=HeadSpec(
            name="lm_head",
            tied=config.flag("tie_word_embeddings", True),
            projection=_projection("project_out", size, row_size),
        ),
        optional_prefix="model.",
    )


def _projection(name: str, in_features: int, out_features: int) -> LinearSpec | None:
    """Return the projection where the size of token vectors differs from the model's, else None."""
    return None if in_features == out_features else linear(in_features, (f"{DECODER}.{name}", out_features))


def _layer(config: ConfigValues, name: str, size: int, norms_first: bool) -> LayerSpec:
    num_heads = config.size("num_heads", "num_attention_heads", default=12)
    inner, biased = config.size("intermediate_size", "ffn_dim", default=4 * size), config.flag("enable_bias", True)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_size(size, num_heads),
        qkv=linear(size, *((f"{name}.self_attn.{part}_proj", size) for part in "qkv"), bias=biased),
        output=linear(size, (f"{name}.self_attn.out_proj", size), bias=biased),
        scale=head_size(size, num_heads) ** -0.5,
    )
    mlp = plain_mlp(
        linear(size, (f"{name}.fc1", inner), bias=biased),
        linear(inner, (f"{name}.fc2", size), bias=biased),
        config.activation("activation_function", default="relu"),
    )
    norms = [layer_norm(f"{name}.{which}layer_norm", size, EPS) for which in ("self_attn_", "final_")]
    return LayerSpec(name, (_residual(norms[0], attention, norms_first), _residual(norms[1], mlp, norms_first)))


def _residual(norm: NormSpec, block: BlockSpec, norms_first: bool) -> ResidualSpec:
    if norms_first:
        return ResidualSpec((BranchSpec(norm=norm, block=block),))
    return ResidualSpec((BranchSpec(norm=None, block=block),), norm=norm)


FAMILY = Family(read_config)
