"""The kinds of model sources by scheme: those of Pagemill, and those that installed packages register.

A package registers a kind as an entry point of group `pagemill.sources`: its name is the scheme, its object a class
that is made without arguments. A package that cannot be loaded disables only its own kind.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from pagemill_models.sources.base import SourceKind
from pagemill_models.sources.schemes.google_storage import GoogleStorage
from pagemill_models.sources.schemes.hugging_face import HUB_SOURCE, HuggingFace
from pagemill_models.sources.schemes.local_file import LocalFile
from pagemill_models.sources.schemes.oci import OCIRegistry
from pagemill_models.sources.schemes.python_package import PythonPackage
from pagemill_models.sources.schemes.s3 import S3
from pagemill_models.sources.schemes.volume_claim import VolumeClaim
from pagemill_protocol.source_errors import SourceError

logger = logging.getLogger("pagemill.sources")

GROUP = "pagemill.sources"
BUILT_IN: tuple[SourceKind, ...] = (
    PythonPackage(),
    LocalFile(),
    VolumeClaim(),
    HuggingFace(),
    S3(),
    GoogleStorage(),
    OCIRegistry(),
)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


class RegisteredSources(NamedTuple):
    kinds: Mapping[str, SourceKind]
    faults: Mapping[str, str]
    """Scheme to reason for kinds of packages that cannot be used."""


@cache
def registered() -> RegisteredSources:
    found, faults = {kind.scheme: kind for kind in BUILT_IN}, {}
    for entry in entry_points(group=GROUP):
        try:
            found[entry.name] = _load(entry, found)
        except Exception as error:
            faults[entry.name] = f"{entry.value}: {type(error).__name__}: {error}"
            logger.warning("model sources %s:// of another package are left out: %s", entry.name, faults[entry.name])
    return RegisteredSources(found, {name: fault for name, fault in faults.items() if name not in found})


def kinds() -> list[SourceKind]:
    return list(registered().kinds.values())


def in_full(source: str) -> str:
    """Return `hf://ORG/NAME` for ORG/NAME, as people type it; any other source unchanged."""
    return f"hf://{source}" if "://" not in source and HUB_SOURCE.fullmatch(source) else source


def find_kind(source: str, field: str = "model.source") -> SourceKind:
    """Return the kind of a source. Raises `SourceError` where no installed kind has its scheme."""
    scheme, separator, _ = source.partition("://")
    known = registered()
    if separator and scheme in known.kinds:
        return known.kinds[scheme]
    if scheme in known.faults:
        raise SourceError(field, f"`{source}`: {scheme}:// cannot be used here: {known.faults[scheme]}")
    what = f"has the unknown scheme `{scheme}`" if separator else "names no scheme"
    raise SourceError(field, f"`{source}` {what}. {forms()}")


def is_fetched(source: str) -> bool:
    """Whether the source's files come over a network; False also for sources of no kind."""
    written = in_full(source)
    try:
        return "://" in written and find_kind(written).is_remote
    except SourceError:
        return False


def forms() -> str:
    """Return a sentence with the syntax of all sources."""
    written = ", ".join(f"`{kind.form}`" for kind in kinds())
    return f"Use a path, ORG/NAME of a Hugging Face model, or one of {written}."


def _load(entry: EntryPoint, known: Mapping[str, SourceKind]) -> SourceKind:
    if entry.name in known:
        raise ValueError(f"there is a kind {entry.name}:// already; register it under another scheme")
    if not _SCHEME.fullmatch(entry.name):
        raise ValueError("a scheme is of lower-case letters, digits, `+`, `-` and `.`")
    kind: SourceKind = entry.load()()
    if kind.scheme != entry.name:
        raise ValueError(f"its scheme is {kind.scheme!r}; it must be that of its entry point")
    return kind
