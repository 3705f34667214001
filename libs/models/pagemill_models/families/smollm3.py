"""SmolLM3 (Hugging Face, 2025): Llama in which every fourth layer has no rotary embedding."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_attention
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config

WINDOWED = "sliding_attention"


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=32_768, default_tied=True)
    biased, num_layers = config.flag("attention_bias", False), numbers.num_layers
    numbers = replace(
        numbers,
        attention_bias=biased,
        attention_output_bias=biased,
        mlp_bias=config.flag("mlp_bias", False),
    )
    windowed = [layer for layer, kind in enumerate(config.layer_types(num_layers) or []) if kind == WINDOWED]
    plain = decoder(numbers.with_window(config.window(default=None), windowed))
    interval = config.size("interval", "no_rope_layer_interval", default=4)
    rotated = config.integers("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if len(rotated) != num_layers:
        raise config.wrong("no_rope_layers", rotated, f"a list of {num_layers} numbers, 0 or 1")
    return with_attention(plain, lambda index, spec: spec if rotated[index] else replace(spec, rope=None))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return read_config(GGUFConfig(values))


FAMILY = Family(read_config, read_gguf, gguf_names(interleaved=True))
