"""Phi-3 and Phi-4 (arXiv 2404.14219): Llama with queries, keys and values, and gate and up projection, in one matrix
each, and a rotary embedding that may be partial."""

from __future__ import annotations

import msgspec

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=4096, partial_rotary=("partial_rotary_factor", 1.0))
    windowed = numbers.with_window(config.window(default=None), range(numbers.num_layers))
    return decoder(msgspec.structs.replace(windowed, fused=True))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return read_config(GGUFConfig(values))


_NAMES = gguf_names(interleaved=False)
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
FAMILY = Family(read_config, read_gguf, _NAMES._replace(in_layer=_NAMES.in_layer | _FUSED))
