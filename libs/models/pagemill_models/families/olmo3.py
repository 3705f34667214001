"""OLMo 3 (Allen AI, 2025): OLMo 2 with a window in three of four layers, which no scaling of positions concerns."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_attention
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, RopeSpec
from pagemill_models.declaration.family import Family
from pagemill_models.families.gemma3 import FULL, WINDOWED
from pagemill_models.families.llama_like import decoder, numbers_from_config
from pagemill_models.families.olmo2 import with_norms_behind


def read_config(config: ConfigValues) -> DecoderSpec:
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


FAMILY = Family(read_config)
