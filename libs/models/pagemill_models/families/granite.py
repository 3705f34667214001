"""Granite 3 (IBM, 2024): Llama with multipliers of embeddings, residuals, scores and logits."""

from __future__ import annotations

from pagemill_models.declaration.changes import changed_head, replace, with_attention
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import BranchSpec, DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families import llama
from pagemill_models.families.llama_like import gguf_names


def read_config(config: ConfigValues) -> DecoderSpec:
    plain = llama.read_config(config)
    residual = config.number("residual_multiplier", default=1.0)

    def scaled(branch: BranchSpec) -> BranchSpec:
        return replace(branch, scale=residual)

    plain = replace(
        plain,
        embedding=replace(plain.embedding, scale=config.number("embedding_multiplier", default=1.0)),
        layers=tuple(layer.with_branches(scaled) for layer in plain.layers),
        head=changed_head(plain, scale=1 / (config.optional_number("logits_scaling") or 1.0)),
    )
    scale = config.number("attention_multiplier", default=1.0)
    return with_attention(plain, lambda _, spec: replace(spec, scale=scale))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    size, num_heads = values.size("hidden_size", "embedding_length"), values.size("num_heads", "attention.head_count")
    multipliers = {
        "embedding_multiplier": values.number("embedding_scale", 1.0),
        "residual_multiplier": values.number("residual_scale", 1.0),
        "attention_multiplier": values.number("attention.scale", values.head_dim(size, num_heads) ** -0.5),
        "logits_scaling": values.number("logit_scale", 1.0),
    }
    return read_config(GGUFConfig(values, **multipliers))


FAMILY = Family(read_config, read_gguf, gguf_names(interleaved=True))
