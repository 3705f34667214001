"""InternLM 2 (arXiv 2403.17297): Llama with other names; each group of queries is stored with its key and value."""

from __future__ import annotations

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RowGroups,
)
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import linear, sequential
from pagemill_models.families.llama_like import Numbers, decoder, gguf_names, numbers_from_config, numbers_from_gguf


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers, biased = numbers_from_config(config, default_context=32_768), config.flag("bias", False)
    size = numbers.hidden_size
    return DecoderSpec(
        architecture=config.architecture,
        hidden_size=size,
        vocab_size=numbers.vocab_size,
        max_position_embeddings=numbers.max_position_embeddings,
        embedding=EmbeddingSpec(name="model.tok_embeddings", num_rows=numbers.vocab_size, size=size),
        layers=tuple(_layer(numbers, f"model.layers.{index}", biased) for index in range(numbers.num_layers)),
        norm=NormSpec(name="model.norm", size=size, eps=numbers.rms_norm_eps),
        head=HeadSpec(name="output", tied=numbers.tied),
    )


def _layer(numbers: Numbers, name: str, biased: bool) -> LayerSpec:
    size, inner, head_dim = numbers.hidden_size, numbers.intermediate_size, numbers.head_dim
    heads, groups = numbers.num_heads, numbers.num_kv_heads
    in_groups = RowGroups(groups, (heads // groups * head_dim, head_dim, head_dim))
    rows = (heads + 2 * groups) * head_dim
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        qkv=linear(size, (f"{name}.attention.wqkv", rows), bias=biased, groups=in_groups),
        output=linear(heads * head_dim, (f"{name}.attention.wo", size), bias=biased),
        scale=head_dim**-0.5,
        rope=numbers.rope,
    )
    mlp = MLPSpec(
        up=linear(size, (f"{name}.feed_forward.w1", inner), (f"{name}.feed_forward.w3", inner)),
        down=linear(inner, (f"{name}.feed_forward.w2", size)),
        activation=numbers.activation,
        gated=True,
    )
    norms = [
        NormSpec(name=f"{name}.{which}_norm", size=size, eps=numbers.rms_norm_eps) for which in ("attention", "ffn")
    ]
    return sequential(name, (norms[0], attention), (norms[1], mlp))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    """Declare a GGUF file's decoder, which equals Llama's: converters split the groups."""
    return decoder(numbers_from_gguf(values))


FAMILY = Family(read_config, read_gguf, gguf_names(interleaved=True))
