"""GPT-BigCode (arXiv 2301.03988), StarCoder: GPT-2 with multi-query attention and untransposed matrices."""

from __future__ import annotations

import msgspec

from pagemill_models.declaration.changes import with_stacked_rows
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import AttentionSpec, BranchSpec, DecoderSpec, LayerSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import linear, query_key_value_by_head
from pagemill_models.families import gpt2


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = gpt2.numbers_from_config(config)._replace(
        conv1d=False,
        scaled_by_layer=False,
        activation=config.activation("activation_function", default="gelu_pytorch_tanh"),
    )
    plain, multi_query = gpt2.decoder(numbers), config.flag("multi_query", True)
    return msgspec.structs.replace(plain, layers=tuple(_layer(layer, multi_query) for layer in plain.layers))


def _layer(layer: LayerSpec, multi_query: bool) -> LayerSpec:
    def changed(branch: BranchSpec) -> BranchSpec:
        if not isinstance(branch.block, AttentionSpec):
            return branch
        return msgspec.structs.replace(branch, block=_attention(branch.block, multi_query))

    return layer.with_branches(changed)


def _attention(plain: AttentionSpec, multi_query: bool) -> AttentionSpec:
    size, head_dim, (matrix,) = plain.qkv.in_features, plain.head_dim, plain.qkv.parts
    num_kv_heads = 1 if multi_query else plain.num_heads
    groups = None if multi_query else query_key_value_by_head(plain.num_heads, head_dim)
    qkv = linear(size, (matrix.name, size + 2 * num_kv_heads * head_dim), bias=True, groups=groups)
    return msgspec.structs.replace(plain, num_kv_heads=num_kv_heads, qkv=qkv)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    multi_query = values.integer("attention.head_count_kv", 1) == 1
    config = GGUFConfig(values, n_positions=values.integer("context_length"), multi_query=multi_query)
    return with_stacked_rows(read_config(config))


FAMILY = Family(read_config, read_gguf, gpt2.GGUF_NAMES)
