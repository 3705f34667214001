"""OLMo Hybrid (Allen AI, 2026): gated delta rules behind norms in three of four layers, OLMo 3's attention with norms
behind blocks in the others."""

from __future__ import annotations

from pagemill_models.declaration.caches import DeltaRuleSpec
from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import AttentionSpec, DecoderSpec, LayerSpec, NormSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.parts import linear, sequential
from pagemill_models.families.llama_like import Numbers, decoder, numbers_from_config
from pagemill_models.families.mamba2 import FULL, kinds_of_layers
from pagemill_models.families.norms_behind import layer_with_norms_behind, whole_norms

RENAMED = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}
DRAFTING = "mtp."
"""Prefix of layers that draft further tokens, which are not run."""
GATED_EPS = 1e-5
"""Epsilon of the gated norms, regardless of `rms_norm_eps`."""


def read_config(config: ConfigValues) -> DecoderSpec:
    rotated = config.is_rotated
    if not rotated:
        config = config.replaced(rope_parameters=None, rope_scaling=None, rope_theta=None)
    numbers = numbers_from_config(config, default_context=65_536)
    if numbers.activation != "silu":
        raise config.unsupported(f"the activation `{numbers.activation}` beside a gated delta rule")
    biased = config.flag("attention_bias", False)
    numbers = replace(numbers, attention_bias=biased, attention_output_bias=biased)
    num_layers = numbers.num_layers
    kinds = kinds_of_layers(config, num_layers, "layer_types") or _default_kinds(num_layers)

    def layer(plain: LayerSpec, kind: str) -> LayerSpec:
        attention, mlp = plain.blocks()
        assert isinstance(attention, AttentionSpec)
        if kind != FULL:
            first, second = plain.norms()
            return sequential(
                plain.name, (first, _delta_rule(config, f"{plain.name}.linear_attn", numbers)), (second, mlp)
            )
        normed = whole_norms(replace(attention, rope=attention.rope if rotated else None), plain, numbers)
        return layer_with_norms_behind(plain, (normed, mlp), numbers)

    plain = decoder(numbers)
    layers = tuple(map(layer, plain.layers, kinds))
    return replace(plain, layers=layers, renamed=RENAMED, ignored_layers=(DRAFTING,))


def _default_kinds(num_layers: int) -> list[str]:
    kinds = [FULL if index % 4 == 3 else "linear_attention" for index in range(num_layers)]
    return kinds if FULL in kinds else [*kinds[:-1], FULL]


def _delta_rule(config: ConfigValues, name: str, numbers: Numbers) -> DeltaRuleSpec:
    size, num_heads = numbers.hidden_size, numbers.num_heads
    num_keys = config.size("linear_num_key_heads", default=num_heads)
    num_values = config.size("linear_num_value_heads", default=num_heads)
    if num_values % num_keys:
        raise config.wrong("linear_num_value_heads", num_values, f"a multiple of the {num_keys} linear_num_key_heads")
    key_dim = config.size("linear_key_head_dim", default=max(1, int(0.75 * size / num_keys)))
    value_dim = config.size("linear_value_head_dim", default=2 * key_dim)
    of_keys, of_values = num_keys * key_dim, num_values * value_dim
    rows = {"q": of_keys, "k": of_keys, "v": of_values, "g": of_values}
    return DeltaRuleSpec(
        name=name,
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=key_dim,
        value_dim=value_dim,
        width=config.size("linear_conv_kernel_dim", default=4),
        inputs=linear(size, *((f"{name}.{part}_proj", count) for part, count in rows.items())),
        rates=linear(size, (f"{name}.b_proj", num_values), (f"{name}.a_proj", num_values)),
        norm=NormSpec(name=f"{name}.o_norm", size=value_dim, eps=GATED_EPS),
        output=linear(of_values, (f"{name}.o_proj", size)),
        rate_scale=2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0,
        split=True,
    )


FAMILY = Family(read_config)
