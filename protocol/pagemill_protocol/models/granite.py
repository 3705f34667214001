"""Granite 3 (IBM, 2024): Llama with multipliers of embeddings, residuals, scores and logits."""

from __future__ import annotations

from pagemill_protocol.models import llama
from pagemill_protocol.models.changes import replace, with_attention
from pagemill_protocol.models.config_values import ConfigValues
from pagemill_protocol.models.declaration import BranchSpec, DecoderSpec
from pagemill_protocol.models.family import Family


def read_config(config: ConfigValues) -> DecoderSpec:
    plain = llama.read_config(config)
    residual = config.number("residual_multiplier", default=1.0)

    def scaled(branch: BranchSpec) -> BranchSpec:
        return replace(branch, scale=residual)

    plain = replace(
        plain,
        embedding=replace(plain.embedding, scale=config.number("embedding_multiplier", default=1.0)),
        layers=tuple(layer.with_branches(scaled) for layer in plain.layers),
        head=replace(plain.head, scale=1 / (config.optional_number("logits_scaling") or 1.0)),
    )
    scale = config.number("attention_multiplier", default=1.0)
    return with_attention(plain, lambda _, spec: replace(spec, scale=scale))


FAMILY = Family(read_config)
