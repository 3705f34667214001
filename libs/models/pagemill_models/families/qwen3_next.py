"""Qwen3-Next: gated delta rules in three of four layers, gated attention in the others, experts with a shared one.

Qwen3.5 differs from it in how matrices are stored, and has plain MLPs in its dense models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pagemill_models.declaration.caches import DeltaRuleSpec
from pagemill_models.declaration.changes import with_whole_norms
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
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import linear, sequential
from pagemill_models.families.llama_like import Numbers, decoder, gguf_names, named_layer, numbers_from_config
from pagemill_models.families.moe import GGUF_IN_LAYER, ONE_ROW, mixture_from_gguf, stored_together, with_drafting
from pagemill_models.families.qwen2_moe import sparse_layers, sparse_mixture, with_shared

FULL, RECURRENT = "full_attention", "linear_attention"
PARTIAL = ("partial_rotary_factor", 0.25)
BOTH = ("inputs", "rates")
"""The linear layers of a delta rule that Qwen3-Next's folders store by key heads."""
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
        grouped=BOTH,
        block_of=lambda index, layer: with_shared(experts, shared_size, layer) if index in sparse else None,
    )


def hybrid(
    config: ConfigValues,
    numbers: Numbers,
    *,
    grouped: tuple[str, ...] = (),
    block_of: Callable[[int, LayerSpec], BlockSpec | None] = lambda *_: None,
) -> DecoderSpec:
    """Declare a decoder with the layers that `layer_types` or `full_attention_interval` names.

    `grouped`: those of `BOTH` that are stored by key heads. `block_of`: the block in place of a layer's
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
        whole, mtp=(_drafter(numbers, made(FULL, 0, named_layer(own, 0, f"{DRAFTING}layers.0"))),)
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


def _delta_rule(config: ConfigValues, name: str, numbers: Numbers, grouped: tuple[str, ...]) -> DeltaRuleSpec:
    num_keys = config.size("linear_num_key_heads", default=16)
    num_values = config.size("linear_num_value_heads", default=32)
    if num_values % num_keys:
        raise config.wrong("linear_num_value_heads", num_values, f"a multiple of the {num_keys} linear_num_key_heads")
    key_dim, value_dim = (config.size(f"linear_{part}_head_dim", default=128) for part in ("key", "value"))
    keys, values, size = num_keys * key_dim, num_values * value_dim, numbers.hidden_size
    by_key, of_key = num_values // num_keys, (num_values // num_keys) * value_dim
    inputs = linear(size, (f"{name}.in_proj_qkv", 2 * keys + values), (f"{name}.in_proj_z", values))
    rates = linear(size, (f"{name}.in_proj_b", num_values), (f"{name}.in_proj_a", num_values))
    if "inputs" in grouped:
        groups = RowGroups(num_keys, (key_dim, key_dim, of_key, of_key))
        inputs = linear(size, (f"{name}.in_proj_qkvz", 2 * keys + 2 * values), groups=groups)
    if "rates" in grouped:
        rates = linear(size, (f"{name}.in_proj_ba", 2 * num_values), groups=RowGroups(num_keys, (by_key, by_key)))
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


def gguf_hybrid(
    values: GGUFValues,
    *,
    grouped: tuple[str, ...] = (),
    block_of: Callable[[int, LayerSpec], BlockSpec | None] = lambda *_: None,
    **own: Any,
) -> DecoderSpec:
    """Declare the decoder of a GGUF file as `hybrid` does, whose norms are stored whole. `own`: further keys."""
    num_keys, num_values = values.integer("ssm.group_count"), values.integer("ssm.time_step_rank")
    inner, drafting = values.integer("ssm.inner_size"), values.drafting()
    if num_values < 1 or inner % num_values:
        raise values.wrong("ssm.time_step_rank", num_values, f"a divisor of the {inner} values of all heads")
    interval = values.size("period", "full_attention_interval", 4)
    num_layers = values.size("num_layers", "block_count") - drafting
    kinds = [RECURRENT if (index + 1) % interval else FULL for index in range(num_layers)]
    config = GGUFConfig(
        values,
        layer_types=kinds + [FULL] * drafting,
        attention_bias=values.has_in_layers("attn_q.bias"),
        linear_num_key_heads=num_keys,
        linear_num_value_heads=num_values,
        linear_key_head_dim=values.integer("ssm.state_size"),
        linear_value_head_dim=inner // num_values,
        linear_conv_kernel_dim=values.integer("ssm.conv_kernel"),
        mtp_num_hidden_layers=0,
        **own,
    )
    numbers = numbers_from_config(config, default_context=32_768, partial_rotary=PARTIAL)
    longer = msgspec.structs.replace(numbers, num_layers=num_layers + drafting)
    whole = with_whole_norms(hybrid(config, longer, grouped=grouped, block_of=block_of))
    return with_drafting(whole, num_layers, drafting)


def gguf_experts(values: GGUFValues) -> Callable[[int, LayerSpec], BlockSpec | None]:
    """Return `block_of` of `gguf_hybrid`: experts with a shared one in every layer."""
    experts = mixture_from_gguf(values, size_key="expert_feed_forward_length", renormalized=True)
    shared_size = values.size("intermediate_size", "expert_shared_feed_forward_length")

    def block(index: int, layer: LayerSpec) -> BlockSpec | None:
        both = values.has(f"blk.{index}.ffn_gate_up_exps.weight")
        found = with_shared(experts, shared_size, layer)
        return stored_together(found) if both else found

    return block


def read_gguf(values: GGUFValues) -> DecoderSpec:
    grouped = BOTH if values.has_in_layers("ssm_in.weight") else BOTH[1:]
    return gguf_hybrid(values, grouped=grouped, block_of=gguf_experts(values), **inner_size(values))


def inner_size(values: GGUFValues) -> dict[str, Any]:
    """Return the size of plain MLPs, which files of experts may lack, as a key of `config.json`."""
    return {"intermediate_size": values.integer("feed_forward_length", values.integer("expert_feed_forward_length"))}


_OF_RULE = {
    "attn_qkv": "in_proj_qkv",
    "attn_gate": "in_proj_z",
    "ssm_in": "in_proj_qkvz",
    "ssm_ba": "in_proj_ba",
    "ssm_alpha": "in_proj_a",
    "ssm_beta": "in_proj_b",
    "ssm_conv1d": "conv1d",
    "ssm_a": "A_log",
    "ssm_dt.bias": "dt_bias",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
_NAMES = gguf_names(interleaved=False)
GGUF_NAMES = _NAMES._replace(
    in_layer=_NAMES.in_layer
    | GGUF_IN_LAYER
    | {"post_attention_norm": "post_attention_layernorm"}
    | {name: f"linear_attn.{other}" for name, other in _OF_RULE.items()},
    shapes={**ONE_ROW, "ssm_conv1d.weight": (-1, 1, 0), "ssm_a": (-1,)},
    logarithms=("ssm_a",),
)
FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
