"""Where models come from: kinds of sources by their scheme, downloads that go on where they stopped, and their cache.

`base` is the contract, `registry` knows the kinds, `resolve` turns a source into a path here. One file a kind. The
command line, the operator's plan, the loader and the reference page read the same registry.
"""

from pagemill_protocol.source_errors import FetchError, SourceError, UnreadableModelError
from pagemill_protocol.sources.registry import find_kind, in_full, is_fetched, kinds
from pagemill_protocol.sources.resolve import Opened, default_name, open_source, resolve_source

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
    "open_source",
    "resolve_source",
]
