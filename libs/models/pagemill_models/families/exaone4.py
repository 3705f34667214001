"""EXAONE 4 (arXiv 2507.11407): norms behind the blocks and over each head; layers without a window do not rotate."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_attention
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import decoder, numbers_from_config
from pagemill_models.families.norms_behind import with_layer_norms_behind
from pagemill_models.families.olmo2 import GGUF_NAMES


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = replace(numbers_from_config(config, default_context=2048, epsilon=("rms_norm_eps", 1e-5)), qk_norm=True)
    window = config.window()
    if window is None:
        return with_layer_norms_behind(decoder(numbers), numbers)
    windowed = config.windowed_layers(numbers.num_layers)
    plain = with_layer_norms_behind(decoder(numbers.with_window(window, windowed)), numbers)
    return with_attention(plain, lambda index, spec: spec if index in windowed else replace(spec, rope=None))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return read_config(GGUFConfig(values, layer_types=values.layer_types()))


FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
