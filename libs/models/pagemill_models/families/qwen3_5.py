"""Qwen3.5's dense models: gated delta rules in three of four layers, gated attention in the others."""

from __future__ import annotations

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family, ValueHeads
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import numbers_from_config
from pagemill_models.families.qwen3_next import GGUF_NAMES as NAMES
from pagemill_models.families.qwen3_next import PARTIAL, gguf_hybrid, hybrid


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=32_768, default_head_dim=256, partial_rotary=PARTIAL)
    return hybrid(config, numbers)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return gguf_hybrid(values)


ROWS, COLUMNS, ONE_ROW_EACH = ValueHeads(0, whole=True), ValueHeads(1, whole=True), ValueHeads(0, whole=False)
GGUF_NAMES = NAMES._replace(
    tiled={
        **dict.fromkeys(("attn_qkv.weight", "attn_gate.weight", "ssm_conv1d.weight"), ROWS),
        **dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"), ONE_ROW_EACH),
        "ssm_out.weight": COLUMNS,
    }
)
FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
