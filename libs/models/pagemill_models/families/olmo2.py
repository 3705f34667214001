"""OLMo 2 (arXiv 2501.00656): norms only after the blocks, and over all queries and all keys at once."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_attention
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    DecoderSpec,
    LayerSpec,
    NormSpec,
    ResidualSpec,
    RopeSpec,
)
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.rope_settings import DEFAULT_THETA
from pagemill_models.families.gemma3 import FULL, WINDOWED
from pagemill_models.families.llama_like import Numbers, decoder, gguf_names, numbers_from_config


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


def with_norms_behind(plain: DecoderSpec, numbers: Numbers) -> DecoderSpec:
    """Return the decoder with norms behind its blocks in place of those before, and of all queries and keys."""
    behind = with_layer_norms_behind(plain, numbers)
    return with_attention(behind, lambda index, spec: whole_norms(spec, behind.layers[index], numbers))


def with_layer_norms_behind(plain: DecoderSpec, numbers: Numbers) -> DecoderSpec:
    return replace(
        plain, layers=tuple(layer_with_norms_behind(layer, tuple(layer.blocks()), numbers) for layer in plain.layers)
    )


def layer_with_norms_behind(plain: LayerSpec, blocks: tuple[BlockSpec, ...], numbers: Numbers) -> LayerSpec:
    """Return the layer with attention and MLP, `blocks`, each before a norm of its own."""
    behind = zip(("post_attention", "post_feedforward"), blocks, strict=True)
    branches = [
        BranchSpec(block=block, output_norm=_norm(f"{plain.name}.{name}_layernorm", numbers.hidden_size, numbers))
        for name, block in behind
    ]
    return LayerSpec(plain.name, tuple(ResidualSpec((branch,)) for branch in branches))


def whole_norms(plain: AttentionSpec, layer: LayerSpec, numbers: Numbers) -> AttentionSpec:
    """Return attention with one norm over all queries and one over all keys."""
    name, head_dim = f"{layer.name}.self_attn", plain.head_dim
    return replace(
        plain,
        query_norm=_norm(f"{name}.q_norm", plain.num_heads * head_dim, numbers),
        key_norm=_norm(f"{name}.k_norm", plain.num_kv_heads * head_dim, numbers),
    )


def _norm(name: str, size: int, numbers: Numbers) -> NormSpec:
    return NormSpec(name=name, size=size, eps=numbers.rms_norm_eps)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    if values.window() is None:
        return read_config(GGUFConfig(values))
    theta = values.number("rope.freq_base", DEFAULT_THETA)
    return read_windowed(GGUFConfig(values, layer_types=values.layer_types(), rope_local_base_freq=theta))


_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_NAMES = gguf_names(interleaved=False)
GGUF_NAMES = _NAMES._replace(in_layer=_NAMES.in_layer | _BEHIND)
FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
