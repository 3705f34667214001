"""Falcon-H1 (arXiv 2507.22448): attention and one of Mamba 2's state spaces side by side in every layer, with
multipliers.

A multiplier of a block's input is a factor on the weights of its norm, one of its output the scale of its branch, and
that of keys a factor on scores.
"""

from __future__ import annotations

from pagemill_models.declaration.changes import changed_head, replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BranchSpec,
    DecoderSpec,
    LayerSpec,
    ResidualSpec,
)
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import HEAD, GGUFValues
from pagemill_models.declaration.parts import linear
from pagemill_models.families.llama_like import decoder, gguf_names, mlp, numbers_from_config
from pagemill_models.families.mamba2 import gguf_keys, state_space_from_config, with_state_spaces
from pagemill_models.files.missing_values import warn_once


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=8192, epsilon=("rms_norm_eps", 1e-5))
    biased = config.flag("attention_bias", False)
    numbers = replace(
        numbers, attention_bias=biased, attention_output_bias=biased, mlp_bias=config.flag("mlp_bias", False)
    )
    size, eps = numbers.hidden_size, numbers.rms_norm_eps
    scales = config.numbers("ssm_multipliers", (1.0,) * 5)
    gate, down = config.numbers("mlp_multipliers", (1.0, 1.0))
    if gate != 1 and (numbers.mlp_bias or not gate > 0):
        raise config.wrong("mlp_multipliers", [gate, down], "positive, and 1 beside `mlp_bias`")
    of_attention = (
        config.number("attention_in_multiplier", default=1.0),
        config.number("attention_out_multiplier", default=1.0),
    )
    of_state_space = config.number("ssm_in_multiplier", default=1.0), config.number("ssm_out_multiplier", default=1.0)
    key_scale = config.number("key_multiplier", default=1.0)

    def layer(plain: LayerSpec) -> LayerSpec:
        name, (first, second) = plain.name, plain.norms()
        attention = next(plain.blocks())
        assert isinstance(attention, AttentionSpec)
        space = state_space_from_config(config, f"{name}.mamba", eps=eps)
        space = replace(
            space,
            output=linear(
                space.output.in_features, (f"{name}.mamba.out_proj", size), bias=config.flag("projectors_bias", False)
            ),
            norm=space.norm if config.flag("mamba_rms_norm", False) else None,
            gates_first=not config.flag("mamba_norm_before_gate", True),
            scales=None if set(scales) == {1.0} else scales,
        )
        attention = replace(attention, scale=attention.scale * key_scale)
        side_by_side = tuple(
            BranchSpec(norm=replace(first, factor=before), block=block, scale=behind)
            for block, (before, behind) in ((space, of_state_space), (attention, of_attention))
        )
        second = replace(second, name=f"{name}.pre_ff_layernorm", factor=gate)
        forward = BranchSpec(norm=second, block=mlp(numbers, f"{name}.feed_forward"), scale=down / gate)
        return LayerSpec(name, (ResidualSpec(side_by_side), ResidualSpec((forward,))))

    plain = decoder(numbers)
    assert plain.norm is not None
    return replace(
        plain,
        embedding=replace(plain.embedding, scale=config.number("embedding_multiplier", default=1.0)),
        layers=tuple(map(layer, plain.layers)),
        norm=replace(plain.norm, name="model.final_layernorm"),
        head=changed_head(plain, scale=config.number("lm_head_multiplier", default=1.0)),
    )


def read_gguf(values: GGUFValues) -> DecoderSpec:
    """Declare a GGUF file's decoder: converters multiply matrices by the multipliers, but for a tied head's own."""
    if not values.has(HEAD):
        warn_once(
            f"`{values.file.path}` has no `{HEAD}`, so that it lacks the multiplier of its logits: 1 is used. Answers "
            "differ at a temperature. Convert a model whose head is its own, or serve the folder."
        )
    config = GGUFConfig(
        values,
        projectors_bias=values.has("blk.0.ssm_out.bias"),
        mamba_rms_norm=values.has("blk.0.ssm_norm.weight"),
        mamba_norm_before_gate=False,
        **gguf_keys(values),
    )
    return replace(read_config(config), folded=True)


_NAMES = gguf_names(interleaved=False)
_IN_LAYER = {
    **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"),
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_OUTSIDE = _NAMES.outside_layers | {"output_norm.weight": "model.final_layernorm.weight"}
GGUF_NAMES = with_state_spaces(_NAMES._replace(outside_layers=_OUTSIDE, folded=True), "mamba", _IN_LAYER)
FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
