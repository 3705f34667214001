"""Nemotron and Minitron (arXiv 2402.16819): layer norms with offset 1, squared ReLU without a gate, a partial rotary
embedding."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_layer_norms, with_mlp, with_whole_norms
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, MLPSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import linear, plain_mlp
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(
        config,
        default_context=4096,
        epsilon=("norm_eps", 1e-5),
        default_activation="relu2",
        partial_rotary=("partial_rotary_factor", 0.5),
    )
    attention_biased, biased = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    plain = decoder(replace(numbers, attention_bias=attention_biased, attention_output_bias=attention_biased))

    def mlp(name: str, gated: MLPSpec) -> MLPSpec:
        size, inner = numbers.hidden_size, numbers.intermediate_size
        up = linear(size, (f"{name}.mlp.up_proj", inner), bias=biased)
        return plain_mlp(up, linear(inner, (f"{name}.mlp.down_proj", size), bias=biased), gated.activation)

    return with_mlp(with_layer_norms(plain, weight_offset=1.0), mlp)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return with_whole_norms(read_config(GGUFConfig(values)))


FAMILY = Family(read_config, read_gguf, gguf_names(interleaved=False))
