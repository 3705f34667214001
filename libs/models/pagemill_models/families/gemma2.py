"""Gemma 2 (arXiv 2408.00118): norms before and after each block, soft caps, a window in every second layer."""

from __future__ import annotations

from typing import Any

import msgspec

from pagemill_models.declaration.changes import changed_head, with_whole_norms
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BranchSpec,
    DecoderSpec,
    LayerSpec,
    NormSpec,
    ResidualSpec,
)
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import head_size
from pagemill_models.families.llama_like import Numbers, decoder, gguf_names, numbers_from_config

WINDOWED = "sliding_attention"
DEFAULT_WINDOW = 4096
LAYERS_OF_27B = 46
"""The only size whose scores are scaled by another number than the head size, which files do not declare."""


def read_config(config: ConfigValues) -> DecoderSpec:
    config.refuse_later_tokens()
    num_layers = config.size("num_layers", "num_hidden_layers")
    kinds = config.layer_types(num_layers) or [
        "full_attention" if layer % 2 else WINDOWED for layer in range(num_layers)
    ]
    return read_layers(config, kinds, default_context=8192)


def read_layers(
    config: ConfigValues, kinds: list[str], *, default_context: int, rope_kind: str | None = None
) -> DecoderSpec:
    """Declare the decoder.

    `kinds`: kind of each layer's attention. `rope_kind`: as `kind` of `ConfigValues.rope`.
    """
    numbers = numbers_from_config(
        config, default_context=default_context, default_head_dim=256, default_tied=True, rope_kind=rope_kind
    )
    biased = config.flag("attention_bias", False)
    numbers = msgspec.structs.replace(
        numbers,
        activation=config.activation("hidden_activation", default="gelu_pytorch_tanh"),
        attention_bias=biased,
        attention_output_bias=biased,
    )
    windowed = [layer for layer, kind in enumerate(kinds) if kind == WINDOWED]
    plain = decoder(numbers.with_window(config.window(), windowed))
    return msgspec.structs.replace(
        plain,
        embedding=msgspec.structs.replace(plain.embedding, scale=numbers.hidden_size**0.5),
        layers=tuple(_layer(config, numbers, layer) for layer in plain.layers),
        norm=_norm("model.norm", numbers),
        head=changed_head(plain, soft_cap=config.optional_number("final_logit_softcapping")),
    )


def _layer(config: ConfigValues, numbers: Numbers, plain: LayerSpec) -> LayerSpec:
    attention, mlp = plain.blocks()
    assert isinstance(attention, AttentionSpec)
    attention = msgspec.structs.replace(
        attention,
        scale=(config.optional_number("query_pre_attn_scalar") or 256.0) ** -0.5,
        soft_cap=config.optional_number("attn_logit_softcapping"),
    )
    between = (("input", attention, "post_attention"), ("pre_feedforward", mlp, "post_feedforward"))
    branches = [
        BranchSpec(
            norm=_norm(f"{plain.name}.{before}_layernorm", numbers),
            block=block,
            output_norm=_norm(f"{plain.name}.{behind}_layernorm", numbers),
        )
        for before, block, behind in between
    ]
    return LayerSpec(plain.name, tuple(ResidualSpec((branch,)) for branch in branches))


def _norm(name: str, numbers: Numbers) -> NormSpec:
    return NormSpec(name=name, size=numbers.hidden_size, eps=numbers.rms_norm_eps, weight_offset=1.0)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    own: dict[str, Any] = {
        "sliding_window": values.window() or DEFAULT_WINDOW,
        "attn_logit_softcapping": values.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.number("final_logit_softcapping", 30.0),
    }
    return with_whole_norms(read_config(GGUFConfig(values, **own, **scale_of_scores(values, LAYERS_OF_27B))))


def scale_of_scores(values: GGUFValues, layers_of_largest: int) -> dict[str, int]:
    size, num_heads = values.size("hidden_size", "embedding_length"), values.size("num_heads", "attention.head_count")
    is_largest = values.size("num_layers", "block_count") == layers_of_largest
    return {"query_pre_attn_scalar": head_size(size, num_heads) if is_largest else values.head_dim(size, num_heads)}


_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAMES = gguf_names(interleaved=False)
GGUF_NAMES = _NAMES._replace(in_layer=_NAMES.in_layer | _BEHIND)

FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
