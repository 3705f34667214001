"""Qwen3-Next: gated delta rules in three of four layers, gated attention in the others, experts with a shared one.

Qwen3.5 differs from it in how matrices are stored, and has plain MLPs in its dense models.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pagemill_models.declaration.caches import DeltaRuleSpec
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BlockSpec,
    DecoderSpec,
    DrafterSpec,
    LayerSpec,
    NormSpec,
    ReadsSpec,
    RowGroups,
)
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.parts import linear, sequential
from pagemill_models.families.llama_like import Numbers, decoder, named_layer, numbers_from_config
from pagemill_models.families.qwen2_moe import sparse_layers, sparse_mixture, with_shared

FULL, RECURRENT = "full_attention", "linear_attention"
PARTIAL = ("partial_rotary_factor", 0.25)
DRAFTING = "mtp."
"""Prefix of the tensors of layers that draft further tokens."""


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=32_768, default_head_dim=256, partial_rotary=PARTIAL)
    sparse = sparse_layers(config, numbers.num_layers)
    experts = sparse_mixture(config, renormalized=True)
    shared_size = config.size("shared_expert_intermediate_size", default=512)
    return hybrid(
        config,
        numbers,
        grouped=True,
        block_of=lambda index, layer: with_shared(experts, shared_size, layer) if index in sparse else None,
    )


def hybrid(
    config: ConfigValues,
    numbers: Numbers,
    *,
    grouped: bool,
    block_of: Callable[[int, LayerSpec], BlockSpec | None] = lambda *_: None,
) -> DecoderSpec:
    """Declare a decoder with the layers that `layer_types` or `full_attention_interval` names.

    `grouped`: whether the inputs of a delta rule are stored by key heads. `block_of`: the block in place of a layer's
    MLP, or None.
    """
    kinds = config.layer_types(numbers.num_layers) or _by_interval(config, numbers.num_layers)
    unknown = next((kind for kind in kinds if kind not in (FULL, RECURRENT)), None)
    if unknown is not None:
        raise config.unsupported(f"layers of the type `{unknown}`")
    if numbers.activation != "silu":
        raise config.unsupported(f"the activation `{numbers.activation}` beside a gated delta rule")
    biased = config.flag("attention_bias", False)
    own = msgspec.structs.replace(numbers, attention_bias=biased, attention_output_bias=biased, qk_norm=True)
    plain = decoder(own)

    def made(kind: str, index: int, layer: LayerSpec) -> LayerSpec:
        attention, mlp = layer.blocks()
        assert isinstance(attention, AttentionSpec)
        mixer = (
            _gated(attention) if kind == FULL else _delta_rule(config, f"{layer.name}.linear_attn", numbers, grouped)
        )
        first, second = map(_from_one, layer.norms())
        return sequential(layer.name, (first, mixer), (second, block_of(index, layer) or mlp))

    layers = [made(kind, index, layer) for index, (kind, layer) in enumerate(zip(kinds, plain.layers, strict=True))]
    norm = None if plain.norm is None else _from_one(plain.norm)
    whole = msgspec.structs.replace(plain, layers=tuple(layers), norm=norm, ignored_layers=(DRAFTING,))
    if config.integer("mtp_num_hidden_layers", "num_nextn_predict_layers", default=1) != 1:
        return whole  # the norm behind further layers is the same tensor, so these are no heads of their own
    return msgspec.structs.replace(
        whole, mtp=_drafter(numbers, made(FULL, 0, named_layer(own, 0, f"{DRAFTING}layers.0")))
    )


def _drafter(numbers: Numbers, layer: LayerSpec) -> DrafterSpec:
    """Declare the head that drafts. Files may lack it, and transformers ignores it."""
    size = numbers.hidden_size
    of_embedding, of_hidden, last = (
        _from_one(NormSpec(name=f"{DRAFTING}{name}", size=size, eps=numbers.rms_norm_eps))
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    )
    reads = ReadsSpec(
        embedding_norm=of_embedding,
        hidden_norm=of_hidden,
        projection=linear(2 * size, (f"{DRAFTING}fc", size)),
        prefix=DRAFTING,
    )
    return DrafterSpec(reads, layer, last)


def _by_interval(config: ConfigValues, num_layers: int) -> list[str]:
    interval = config.size("full_attention_interval", default=4)
    return [RECURRENT if (index + 1) % interval else FULL for index in range(num_layers)]


def _from_one(norm: NormSpec) -> NormSpec:
    """Return the norm with weights that are stored less 1."""
    return msgspec.structs.replace(norm, weight_offset=1.0)


def _gated(attention: AttentionSpec) -> AttentionSpec:
    queries, *others = attention.qkv.parts
    size, num_heads = attention.head_dim, attention.num_heads
    both = msgspec.structs.replace(queries, rows=2 * queries.rows, groups=RowGroups(num_heads, (size, size)))
    assert attention.query_norm is not None
    assert attention.key_norm is not None
    return msgspec.structs.replace(
        attention,
        qkv=msgspec.structs.replace(attention.qkv, parts=(both, *others)),
        query_norm=_from_one(attention.query_norm),
        key_norm=_from_one(attention.key_norm),
        gated=True,
    )


def _delta_rule(config: ConfigValues, name: str, numbers: Numbers, grouped: bool) -> DeltaRuleSpec:
    num_keys = config.size("linear_num_key_heads", default=16)
    num_values = config.size("linear_num_value_heads", default=32)
    if num_values % num_keys:
        raise config.wrong("linear_num_value_heads", num_values, f"a multiple of the {num_keys} linear_num_key_heads")
    key_dim, value_dim = (config.size(f"linear_{part}_head_dim", default=128) for part in ("key", "value"))
    keys, values, size = num_keys * key_dim, num_values * value_dim, numbers.hidden_size
    if grouped:
        by_key, of_key = num_values // num_keys, (num_values // num_keys) * value_dim
        groups = RowGroups(num_keys, (key_dim, key_dim, of_key, of_key))
        inputs = linear(size, (f"{name}.in_proj_qkvz", 2 * keys + 2 * values), groups=groups)
        rates = linear(size, (f"{name}.in_proj_ba", 2 * num_values), groups=RowGroups(num_keys, (by_key, by_key)))
    else:
        inputs = linear(size, (f"{name}.in_proj_qkv", 2 * keys + values), (f"{name}.in_proj_z", values))
        rates = linear(size, (f"{name}.in_proj_b", num_values), (f"{name}.in_proj_a", num_values))
    return DeltaRuleSpec(
        name=name,
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=key_dim,
        value_dim=value_dim,
        width=config.size("linear_conv_kernel_dim", default=4),
        inputs=inputs,
        rates=rates,
        norm=NormSpec(name=f"{name}.norm", size=value_dim, eps=numbers.rms_norm_eps),
        output=linear(values, (f"{name}.out_proj", size)),
    )


FAMILY = Family(read_config)
