"""Find the rope settings in a header: `config.json` with its old and new keys, or GGUF metadata.

The module knows where a setting is, which of two keys applies, and what is not implemented: settings per attention
type, partial rotary embeddings, YaRN's further GGUF keys. `rope_scaling` defines valid settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pagemill_models.declaration.rope_scaling import (
    POSITIVE,
    RopeError,
    RopeScaling,
    UnsupportedRopeError,
    is_number,
    make_scaling,
    one_of,
    wrong,
)

DEFAULT_THETA = 10_000.0
MOST_OF_FLOAT32 = 3.4e38

_GGUF_NAMES = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_NOT_IN_GGUF = ("dynamic", "longrope", "su")
"""Kinds of `config.json` whose further values GGUF files store elsewhere, or not at all."""
_GGUF_LONG_MAGNITUDE = "rope.scaling.attn_factor"
_GGUF_OLD_FACTOR = "rope.scale_linear"
_GGUF_WITHOUT_EFFECT = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.alpha": 0.0,
}
"""Keys that are not implemented, with the value that has no effect."""
_GGUF_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_SCALED_BY_MAGNITUDE = {"deepseek2": 10.0, "mistral3": 1.0, "mistral4": 10.0}
"""Architectures whose files store `mscale_all_dim` under that key, divided by this number, and whose `mscale` is equal
to it."""


def settings_of(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the key in a `config.json` and the settings under it.

    The old key is preferred unless it is empty, as in transformers. Raises `RopeError`.
    """
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        if value is not None and not isinstance(value, dict):
            raise RopeError(wrong(name, value, "an object"))
        if value:
            return name, value
    return "rope_parameters", {}


def read_scaling(
    where: str, values: Mapping[str, Any], theta: float, max_position_embeddings: int
) -> RopeScaling | None:
    """Return the scaling in the settings `values`, found at key `where` of a `config.json`. Raises `RopeError`."""
    kind_name = next((name for name in ("rope_type", "type") if name in values), "rope_type")
    if kind_name not in values and "factor" in values:
        raise RopeError(f"`{where}.rope_type` is missing beside `{where}.factor`; it must be {one_of()}.")

    def name_of(field: str) -> str:
        return f"{where}.{kind_name if field == 'rope_type' else field}"

    return make_scaling(values.get(kind_name, "default"), values, theta, max_position_embeddings, name_of)


def read_gguf_scaling(
    metadata: Mapping[str, Any],
    prefix: str,
    theta: float,
    context_length: int,
    long_rope: Mapping[str, list[float]] = MappingProxyType({}),
) -> RopeScaling | None:
    """Return the scaling in a GGUF file of the architecture `prefix`. Raises `RopeError`.

    As in llama.cpp, a factor without a type is linear, a factor of type `none` is ignored, and tensors with LongRoPE's
    lists (`long_rope`: their values under the names of `config.json`) select LongRoPE.
    """
    names = {field: f"{prefix}.{name}" for field, name in _GGUF_NAMES.items()}
    if names["factor"] not in metadata and f"{prefix}.{_GGUF_OLD_FACTOR}" in metadata:
        names["factor"] = f"{prefix}.{_GGUF_OLD_FACTOR}"
    values = {field: _decimal(metadata[name]) for field, name in names.items() if name in metadata}
    kind = values.pop("rope_type", "linear" if "factor" in values else "none")
    if long_rope:
        magnitude = metadata.get(f"{prefix}.{_GGUF_LONG_MAGNITUDE}", 1.0)
        fields = {**long_rope, **values, "attention_factor": _decimal(magnitude)}
        return make_scaling("longrope", fields, theta, context_length, lambda field: names.get(field, field))
    multiplier = metadata.get(f"{prefix}.{_GGUF_LOG_MULTIPLIER}", 0.0)
    if prefix in _SCALED_BY_MAGNITUDE and kind == "yarn" and multiplier:
        values["mscale"] = values["mscale_all_dim"] = _SCALED_BY_MAGNITUDE[prefix] * _decimal(multiplier)
    else:
        _check_without_effect(metadata, prefix, kind, {_GGUF_LOG_MULTIPLIER: 0.0})
    _check_without_effect(metadata, prefix, kind, _GGUF_WITHOUT_EFFECT)
    if kind in _NOT_IN_GGUF:
        raise UnsupportedRopeError(f"the rope scaling `{kind}` in a GGUF file")
    kind = "default" if kind == "none" else kind
    return make_scaling(
        kind, values, theta, context_length, lambda field: names.get(field, f"{prefix}.rope.scaling.{field}")
    )


def _check_without_effect(metadata: Mapping[str, Any], prefix: str, kind: object, keys: Mapping[str, float]) -> None:
    keys = {**keys, "rope.scaling.yarn_ext_factor": 1.0 if kind == "yarn" else 0.0}
    for name, value in keys.items():
        key = f"{prefix}.{name}"
        if metadata.get(key, value) != value:
            raise UnsupportedRopeError(f"`{key}` = {metadata[key]!r:.80}")


def rope_theta(name: str, value: Any, where: str, values: Mapping[str, Any]) -> float:
    """Return the base of the frequencies. Raises `RopeError`.

    `name`, `value`: the base where the settings `values`, found at key `where`, have none.
    """
    if "rope_theta" in values:
        name, value = f"{where}.rope_theta", values["rope_theta"]
    if not is_number(value) or value <= 0:
        raise RopeError(wrong(name, value, POSITIVE))
    return float(value)


def _decimal(value: Any) -> Any:
    """Return the shortest decimal that is the same float32: the number that the file's author wrote."""
    if not isinstance(value, float):
        return value
    if not abs(value) < MOST_OF_FLOAT32:
        return value  # the checks of each setting name it
    import numpy as np

    return float(str(np.float32(value)))
