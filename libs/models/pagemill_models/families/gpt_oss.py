"""gpt-oss (arXiv 2508.10925): experts with biases and clamped gates, attention sinks, a window in every second layer.

Hugging Face folders store the matrices of all experts as one tensor, [inputs, outputs], or in MXFP4, [outputs, inputs];
gate and up projection are interleaved. GGUF files store them separately.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    LinearSpec,
    MatrixSpec,
    MLPSpec,
    MoESpec,
    RowGroups,
)
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import linear, sequential
from pagemill_models.declaration.rope_scaling import YarnScaling
from pagemill_models.families.llama_like import (
    Numbers,
    decoder,
    gguf_names,
    numbers_from_config,
    numbers_from_gguf,
)
from pagemill_models.families.moe import Mixture, mixture_from_config, mixture_from_gguf

ALPHA, LIMIT = 1.702, 7.0


class _Storage(NamedTuple):
    transposed: bool = False
    interleaved: bool = False
    """Whether the rows of gate and up projection alternate in one matrix."""


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(config, default_context=131_072, default_head_dim=64)
    kinds = config.layer_types(numbers.num_layers) or _alternating(numbers.num_layers)
    windowed = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    if config.number("swiglu_alpha", default=ALPHA) != ALPHA:
        raise config.unsupported(f"a swiglu_alpha other than {ALPHA}")
    biased = config.flag("attention_bias", True)
    numbers = msgspec.structs.replace(
        numbers.with_window(config.window(default=128), windowed),
        attention_bias=biased,
        attention_output_bias=biased,
    )
    experts = mixture_from_config(config, size_key="intermediate_size", renormalized=True)
    packed = config.quantization() == "mxfp4"
    storage = _Storage(transposed=not packed, interleaved=True)
    spec = _decoder(numbers, experts, storage, config.number("swiglu_limit", default=LIMIT))
    ending = "_blocks" if packed else ""
    parts = ("gate_up_proj", "down_proj")
    weights = {f".experts.{part}{ending}": (f".experts.*.{part}.weight",) for part in parts}
    biases = {f".experts.{part}_bias": (f".experts.*.{part}.bias",) for part in parts}
    return msgspec.structs.replace(spec, stacked=weights | biases)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    numbers = numbers_from_gguf(values)
    windowed = [layer for layer, kind in enumerate(_alternating(numbers.num_layers)) if kind == "sliding_attention"]
    rope, scaling = numbers.rope, numbers.rope.scaling
    if isinstance(scaling, YarnScaling):
        # Files do not declare it; it is false in all checkpoints.
        rope = msgspec.structs.replace(rope, scaling=msgspec.structs.replace(scaling, truncate=False))
    numbers = msgspec.structs.replace(
        numbers.with_window(values.window(), windowed), attention_bias=True, attention_output_bias=True, rope=rope
    )
    experts = mixture_from_gguf(values, size_key="expert_feed_forward_length", renormalized=True)
    return _decoder(numbers, experts, _Storage(), LIMIT)


def _alternating(num_layers: int) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]


def _decoder(numbers: Numbers, experts: Mixture, storage: _Storage, limit: float) -> DecoderSpec:
    plain = decoder(numbers)
    layers = tuple(_layer(layer, experts, storage, limit) for layer in plain.layers)
    return msgspec.structs.replace(plain, layers=layers)


def _layer(plain: LayerSpec, experts: Mixture, storage: _Storage, limit: float) -> LayerSpec:
    attention, _ = plain.blocks()
    assert isinstance(attention, AttentionSpec)
    attention = msgspec.structs.replace(attention, sinks=f"{plain.name}.self_attn.sinks")
    name = f"{plain.name}.mlp"
    mixture = MoESpec(
        router=linear(experts.hidden_size, (f"{name}.router", experts.num_experts), bias=True),
        experts=tuple(
            _expert(f"{name}.experts.{index}", experts, storage, limit) for index in range(experts.num_experts)
        ),
        top_k=experts.top_k,
        renormalized=True,
    )
    first, second = plain.norms()
    return sequential(plain.name, (first, attention), (second, mixture))


def _expert(name: str, experts: Mixture, storage: _Storage, limit: float) -> MLPSpec:
    size, inner = experts.hidden_size, experts.intermediate_size
    rows = RowGroups(inner, (1, 1))
    up = linear(size, (f"{name}.gate_proj", inner), (f"{name}.up_proj", inner), bias=True)
    up = msgspec.structs.replace(up, trained_groups=rows)
    if storage.interleaved:
        both = MatrixSpec(
            name=f"{name}.gate_up_proj", rows=2 * inner, bias=True, transposed=storage.transposed, groups=rows
        )
        up = LinearSpec(size, (both,))
    down = linear(inner, (f"{name}.down_proj", size), bias=True, transposed=storage.transposed)
    return MLPSpec(up=up, down=down, activation="gelu_quick", gated=True, limit=limit)


_IN_LAYER = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_NAMES = gguf_names(interleaved=False)
FAMILY = Family(read_config, read_gguf, _NAMES._replace(in_layer=_NAMES.in_layer | _IN_LAYER))
