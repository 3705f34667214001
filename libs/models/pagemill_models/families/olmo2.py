"""OLMo 2 (arXiv 2501.00656): norms only after the blocks, and over all queries and all keys at once."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_attention
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, RopeSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.rope_settings import DEFAULT_THETA
from pagemill_models.families.gemma3 import FULL, WINDOWED
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config
from pagemill_models.families.norms_behind import with_norms_behind


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=2048, epsilon=("rms_norm_eps", 1e-5))
    biased = config.flag("attention_bias", False)
    plain = decoder(replace(numbers, attention_bias=biased, attention_output_bias=biased))
    return with_norms_behind(plain, numbers)


def read_windowed(config: ConfigValues) -> DecoderSpec:
    """Declare an OLMo 3: a window in three of four layers, which no scaling of positions concerns."""
    numbers = numbers_from_config(config, default_context=2048, rope_kind=FULL)
    biased = config.flag("attention_bias", False)
    windowed = config.windowed_layers(numbers.num_layers)
    numbers = replace(
        numbers.with_window(config.window(), windowed), attention_bias=biased, attention_output_bias=biased
    )
    if WINDOWED in config.object("rope_parameters"):
        local = config.rope(numbers.head_dim, numbers.max_position_embeddings, kind=WINDOWED)
    else:
        local = RopeSpec(theta=config.number("rope_local_base_freq", default=500_000.0), rotary_dim=numbers.head_dim)
    plain = with_norms_behind(decoder(numbers), numbers)
    return with_attention(plain, lambda index, spec: replace(spec, rope=local) if index in windowed else spec)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    if values.window() is None:
        return read_config(GGUFConfig(values))
    theta = values.number("rope.freq_base", DEFAULT_THETA)
    return read_windowed(GGUFConfig(values, layer_types=values.layer_types(), rope_local_base_freq=theta))


_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_NAMES = gguf_names(interleaved=False)
GGUF_NAMES = _NAMES._replace(in_layer=_NAMES.in_layer | _BEHIND)
FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
