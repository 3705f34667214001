"""Model sources: kinds by their scheme, resumable downloads, and the cache.

`base` defines the interface, `registry` lists the kinds, `resolve` turns a source into a local path. One file per kind.
The command line, the operator's plan, the loader and the reference page read the same registry.
"""

from pagemill_models.sources.registry import find_kind, in_full, is_fetched, kinds
from pagemill_models.sources.resolve import (
    Opened,
    default_name,
    open_by_parts,
    open_source,
    resolve_adapter,
    resolve_source,
)
from pagemill_protocol.source_errors import FetchError, SourceError, UnreadableModelError

__all__ = [
    "FetchError",
    "Opened",
    "SourceError",
    "UnreadableModelError",
    "default_name",
    "find_kind",
    "in_full",
    "is_fetched",
    "kinds",
    "open_by_parts",
    "open_source",
    "resolve_adapter",
    "resolve_source",
]
