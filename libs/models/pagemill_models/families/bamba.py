"""Bamba (IBM, 2024): Mamba 2's state spaces in most layers, attention with a partial rotary embedding in the others."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import BlockSpec, DecoderSpec, LayerSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.parts import sequential
from pagemill_models.families.llama_like import decoder, mlp, numbers_from_config
from pagemill_models.families.mamba2 import state_space_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(
        config,
        default_context=262_144,
        epsilon=("rms_norm_eps", 1e-5),
        partial_rotary=("partial_rotary_factor", 0.5),
    )
    biased = config.flag("attention_bias", False)
    numbers = replace(
        numbers, attention_bias=biased, attention_output_bias=biased, mlp_bias=config.flag("mlp_bias", False)
    )
    attentions = set(config.integers("attn_layer_indices"))
    if not attentions <= set(range(numbers.num_layers)):
        raise config.wrong("attn_layer_indices", sorted(attentions), f"numbers of the {numbers.num_layers} layers")

    def layer(index: int, plain: LayerSpec) -> LayerSpec:
        name, (first, second) = plain.name, plain.norms()
        mixer: BlockSpec = next(plain.blocks())
        if index not in attentions:
            mixer = state_space_from_config(config, f"{name}.mamba", eps=numbers.rms_norm_eps)
        second = replace(second, name=f"{name}.pre_ff_layernorm")
        return sequential(name, (first, mixer), (second, mlp(numbers, f"{name}.feed_forward")))

    plain = decoder(numbers)
    assert plain.norm is not None
    return replace(
        plain,
        layers=tuple(layer(index, each) for index, each in enumerate(plain.layers)),
        norm=replace(plain.norm, name="model.final_layernorm"),
    )


FAMILY = Family(read_config)
