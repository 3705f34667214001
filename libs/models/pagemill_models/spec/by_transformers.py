"""Decoders that no family declares and for which the installed `transformers` has a class: only their sizes.

That class computes the decoder (`pagemill_execution.decoders.by_transformers`); the plan and the KV cache need layers,
heads and context. Layers that cache anything but keys and values of the whole context are refused.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BranchSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    ResidualSpec,
)
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.parts import head_size, linear

_REPLACEABLE, _STATEFUL = "_supports_attention_backend = True", "_is_stateful = True"
"""Marks of classes in transformers: replaceable attention, and a state other than a cache of keys and values."""
_OTHER_STATE = ("attention_chunk_size", "is_encoder_decoder", "kv_lora_rank", "use_bidirectional_attention")
_RECURRENT = ("conv_L_cache", "linear_num_key_heads", "mamba_d_state", "ssm_cfg", "ssm_state_size", "layers_block_type")
"""Keys of config.json that are in use where they are neither missing nor false."""


def class_is_installed(model_type: Any, architecture: str | None = None) -> bool:
    """Whether transformers has a class of that type with replaceable attention. The source is read, not imported.

    `architecture`: required name of the class, where another name would mean code in the model's own files.
    """
    if not isinstance(model_type, str) or not re.fullmatch(r"[a-z0-9_]{1,64}", model_type):
        return False
    found = importlib.util.find_spec("transformers")
    folders = [] if found is None else found.submodule_search_locations or []
    files = [Path(each) / "models" / model_type / f"modeling_{model_type}.py" for each in folders]
    sources = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    own = "" if architecture is None else f"class {architecture}("
    return any(_REPLACEABLE in source and _STATEFUL not in source and own in source for source in sources)


def recurrent_key(values: Mapping[str, Any]) -> str | None:
    """Return the key of a config.json, or of its part on text, that declares recurrent layers, or None."""
    text = values.get("text_config")
    parts = [values, text] if isinstance(text, dict) else [values]
    return next((key for part in parts for key in _RECURRENT if part.get(key) not in (None, False)), None)


def read_config(config: ConfigValues) -> DecoderSpec:
    _check(config)
    num_heads, size = config.size("num_heads", "num_attention_heads"), config.size("hidden_size")
    num_kv_heads = config.size("num_kv_heads", "num_key_value_heads", default=num_heads)
    head_dim = config.size("head_dim", default=head_size(size, num_heads))
    num_layers, vocab_size = config.size("num_layers", "num_hidden_layers"), config.size("vocab_size")
    return DecoderSpec(
        architecture=config.architecture,
        hidden_size=size,
        vocab_size=vocab_size,
        max_position_embeddings=config.size("max_position_embeddings"),
        embedding=EmbeddingSpec(name="embedding", num_rows=vocab_size, size=size),
        layers=tuple(_layer(f"layers.{index}", size, num_heads, num_kv_heads, head_dim) for index in range(num_layers)),
        norm=None,
        head=HeadSpec(name="head", tied=config.flag("tie_word_embeddings", True)),
        by_transformers=True,
    )


def _layer(name: str, size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> LayerSpec:
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv=linear(size, (f"{name}.qkv", (num_heads + 2 * num_kv_heads) * head_dim)),
        output=linear(num_heads * head_dim, (f"{name}.output", size)),
        scale=head_dim**-0.5,
    )
    return LayerSpec(name, (ResidualSpec((BranchSpec(block=attention),)),))


def _check(config: ConfigValues) -> None:
    num_layers = config.size("num_layers", "num_hidden_layers")
    declared = config.layer_types(num_layers)
    kinds = set(declared or ()) - {"full_attention"}
    if kinds:
        raise config.unsupported(f"layers of the kind `{min(kinds)}`, which its class in transformers would need")
    windowed = declared is None and config.flag("use_sliding_window", True) and config.has("sliding_window")
    used = [key for key in _OTHER_STATE if config.in_use(key)] + (["sliding_window"] if windowed else [])
    if used:
        raise config.unsupported(f"`{used[0]}` (by its class in transformers)")
    ropes = [config.object(name) for name in ("rope_parameters", "rope_scaling")]
    if any(rope.get("rope_type", rope.get("type")) in ("longrope", "su") for rope in ropes):
        # transformers' class chooses the factors in every step, by the longest context in it.
        raise config.unsupported("the rope scaling `longrope` (by its class in transformers)")
    if config.quantization() is not None:
        raise config.unsupported(f"weights quantized by `{config.quantization()}` (by its class in transformers)")


FAMILY = Family(read_config)
