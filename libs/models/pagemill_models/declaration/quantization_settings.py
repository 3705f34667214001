"""`quantization_config` of a Hugging Face `config.json`: the methods that are read, and the form of its keys.

The engine's `weights.packed` read the settings of each method; here is what all of them, and the plan, may rely on.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pagemill_protocol.source_errors import SourceError, UnreadableModelError

GROUP = "pagemill.weight_formats"
"""Entry points of packages that read further methods: the name is the method, the engine loads the object."""
BUILT_IN = ("awq", "gptq", "fp8", "compressed-tensors", "bitsandbytes", "mxfp4")
"""Methods whose checkpoints the engine reads itself, as named by `quantization_config.quant_method`."""


def read_quantizations() -> tuple[str, ...]:
    """Return the methods whose checkpoints are read here."""
    return (*BUILT_IN, *sorted(entry_points(group=GROUP).names - {*BUILT_IN}))


_SIZES = (list, tuple)
_NUMBERS = ("bits", "w_bit", "group_size", "q_group_size", "num_bits")
_QUANTIZATION_KINDS: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
    ("quant_method", str, "the name of a method"),
    *((key, int, "a whole number from -1 to 2^24") for key in _NUMBERS),
    *((key, _SIZES, "a list of two sizes") for key in ("weight_block_size", "block_structure")),
    *((key, dict, "an object") for key in ("config_groups",)),
    *((key, str, "text") for key in ("version", "format", "checkpoint_format", "strategy", "type")),
    *((key, (bool, str), "true, false or text") for key in ("desc_act", "actorder")),
)
"""Forms of the keys of `quantization_config`, and of its groups' `weights` and `input_activations`."""
_GROUP_KINDS: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
    ("weights", dict, "an object"),
    ("input_activations", dict, "an object"),
    ("format", str, "text"),
)


def quantization_of(values: dict[str, Any]) -> str | None:
    """Return the quantization method that a config.json declares, or None for floats."""
    value = values.get("quantization_config")
    return str(value.get("quant_method", "unknown")) if isinstance(value, dict) else None


def check_quantization(method: str | None, where: str) -> None:
    """Raise `SourceError` for a method that the engine does not read. `where`: name of the model in the message."""
    if method is None or method in BUILT_IN:
        return
    read = read_quantizations()
    if method in read:
        return
    raise SourceError(
        "model.source",
        f"{where}: its weights are quantized by `{method}` (`quantization_config`), which is not supported; "
        f"{', '.join(read)} are. Use the model's float32, float16 or bfloat16 checkpoint, or a GGUF file "
        "of it.",
        reason="UnsupportedQuantization",
    )


def check_settings(values: dict[str, Any], path: Path) -> None:
    """Raise `UnreadableModelError` for a `quantization_config` of another form than all readers of it expect."""
    settings = values.get("quantization_config")
    if settings is None:
        return
    if not isinstance(settings, dict):
        raise _wrong(path, "quantization_config", settings, "an object")
    for key, kind, wanted in _QUANTIZATION_KINDS:
        if settings.get(key) is not None and not _is_kind(settings[key], kind):
            raise _wrong(path, f"quantization_config.{key}", settings[key], wanted)
    for name, group in (settings.get("config_groups") or {}).items():
        where = f"quantization_config.config_groups.{name[:40]}"
        if not isinstance(group, dict):
            raise _wrong(path, where, group, "an object")
        for key, kind, wanted in _GROUP_KINDS:
            if group.get(key) is not None and not _is_kind(group[key], kind):
                raise _wrong(path, f"{where}.{key}", group[key], wanted)
        for key, kind, wanted in _QUANTIZATION_KINDS:
            for part in ("weights", "input_activations"):
                value = (group.get(part) or {}).get(key)
                if value is not None and not _is_kind(value, kind):
                    raise _wrong(path, f"{where}.{part}.{key}", value, wanted)


def _is_kind(value: object, kind: type | tuple[type, ...]) -> bool:
    if kind == _SIZES:
        return (
            isinstance(value, list)
            and len(value) == 2
            and all(type(each) is int and 0 < each < 1 << 24 for each in value)
        )
    if kind is int:
        return type(value) is int and -1 <= value < 1 << 24
    return isinstance(value, kind)


def _wrong(path: Path, key: str, value: Any, wanted: str) -> UnreadableModelError:
    problem = "is missing" if value is None else f"is {_shown(value)}"
    return UnreadableModelError(f"`{path}`: `{key}` {problem}; it must be {wanted}.")


def _shown(value: Any) -> str:
    """Return a value in words, cut."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} ({str(value)[:80]})"
    return repr(str(value)[:80])


def quantization_bits(values: dict[str, Any]) -> int | None:
    """Return the bits of a quantized weight if `config.json` declares one number for all matrices, else None."""
    settings = values.get("quantization_config")
    if not isinstance(settings, dict):
        return None
    groups = settings.get("config_groups")
    parts = [each.get("weights") for each in groups.values()] if isinstance(groups, dict) else []
    found = [part.get("num_bits") for part in parts if isinstance(part, dict)]
    bits = {each for each in (*found, settings.get("bits"), settings.get("w_bit")) if type(each) is int}
    return bits.pop() if len(bits) == 1 else None
