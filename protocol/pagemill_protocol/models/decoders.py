"""The declaration that a config.json stands for: finds its family and lets it read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagemill_protocol.models import by_transformers
from pagemill_protocol.models.by_transformers import class_is_installed, recurrent_key
from pagemill_protocol.models.config_values import ConfigValues
from pagemill_protocol.models.declaration import DecoderSpec
from pagemill_protocol.models.errors import UnsupportedModelArchitecture
from pagemill_protocol.models.known import GROUP, RECURRENT, unsupported
from pagemill_protocol.models.registry import Found, find_family
from pagemill_protocol.source_errors import UnreadableModelError


def decoder_from_config(values: dict[str, Any], path: Path) -> DecoderSpec:
    """`values`: the content of `path`, a config.json. Raises `SourceError`."""
    found = _find_family(values, path)
    return found.family.read_config(ConfigValues(path, values, found.architecture))


def _find_family(values: dict[str, Any], path: Path) -> Found:
    declared, model_type = values.get("architectures"), values.get("model_type")
    names = [name for name in declared if isinstance(name, str)] if isinstance(declared, list) else []
    if not names and isinstance(model_type, str):
        names = [model_type]
    if not names:
        raise UnreadableModelError(f"`{path}` names neither `architectures` nor `model_type`.")
    try:
        return find_family(names, path.parent)
    except UnsupportedModelArchitecture as error:
        key = recurrent_key(values)
        if key is not None:
            raise unsupported(names[0], path.parent, f" with {RECURRENT} (`{key}`)") from error
        if class_is_installed(model_type):
            return Found(names[0], by_transformers.FAMILY)
        if "auto_map" not in values:
            raise
        raise UnsupportedModelArchitecture(
            f"{error.message} Its `auto_map` names code in the model's own files, which is never run; a package that "
            f"you install may add the architecture (entry points `{GROUP}`)."
        ) from None
