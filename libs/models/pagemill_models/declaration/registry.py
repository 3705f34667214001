"""Find the family of an architecture, and import it when it is first needed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NamedTuple

from pagemill_models.declaration.errors import UnsupportedModelArchitecture
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.known import (
    BUILT_IN,
    GGUF_GROUP,
    GROUP,
    RECURRENT,
    RECURRENT_GGUF,
    TEXT_TYPES,
    entry_points_of,
    unsupported,
)


class FoundFamily(NamedTuple):
    architecture: str
    """Canonical name of the architecture."""
    family: Family
    model_type: str | None = None
    """That of the class whose defaults apply; `None`: unknown."""


def find_family(names: Iterable[str], path: Path) -> FoundFamily:
    """Return the family of the first known name of `names`, which are architectures or a model type.

    Raises `UnsupportedModelArchitecture` with the list of known ones. `path`: path of the model, for the message.
    """
    names = list(names)
    for name in names:
        for module, known in BUILT_IN.items():
            if name in (*known.architectures, known.model_type):
                return FoundFamily(known.architectures[0], _built_in(module), known.model_type)
    added = entry_points_of(GROUP)
    for name in names:
        if name in added:
            return FoundFamily(name, _load(added[name]))
    raise unsupported(names[0] if names else "", path)


def find_text_family(architecture: str, model_type: str, path: Path) -> FoundFamily:
    """Return the family of a multimodal model's text part as `find_family`. `architecture`: the whole model's."""
    module = TEXT_TYPES.get(model_type)
    family = find_family([model_type], path).family if module is None else _built_in(module)
    return FoundFamily(architecture, family, model_type)


def find_gguf_family(name: str, path: Path) -> FoundFamily:
    """Return the family as `find_family`, by `general.architecture`."""
    for module, known in BUILT_IN.items():
        if name in known.gguf:
            return FoundFamily(known.architectures[0], _built_in(module))
    added = entry_points_of(GGUF_GROUP)
    if name in added:
        return FoundFamily(name, _load(added[name]))
    raise unsupported(name, path, f" with {RECURRENT}" if name in RECURRENT_GGUF else "")


def _built_in(module: str) -> Family:
    family: Family = importlib.import_module(f"pagemill_models.families.{module}").FAMILY
    return family


def _load(point: EntryPoint) -> Family:
    package = point.dist.name if point.dist is not None else point.module
    try:
        found = point.load()
    except Exception as error:
        raise UnsupportedModelArchitecture(
            f"The architecture `{point.name}` comes from the package `{package}`, whose `{point.value}` cannot be "
            f"imported ({type(error).__name__}: {error}). Repair or remove that package."
        ) from error
    if not isinstance(found, Family):
        raise UnsupportedModelArchitecture(
            f"The architecture `{point.name}` comes from the package `{package}`, whose `{point.value}` is a "
            f"{type(found).__name__}, not a `Family`. Repair or remove that package."
        )
    return found
