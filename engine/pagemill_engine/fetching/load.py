"""Loads a remote source into a folder of a volume. `pagemill_models.sources` fetches the files."""

from __future__ import annotations

from pagemill_engine.fetching.settings import LoaderSettings
from pagemill_models.sources import FetchError, SourceError, find_kind, in_full
from pagemill_models.sources.base import SourceKind
from pagemill_models.sources.store.cache import ModelCache
from pagemill_models.sources.store.faults import explain_disk
from pagemill_models.sources.store.fetch import OnFault, Report, Watch, ignore_fault


def load(settings: LoaderSettings, report: Report, on_fault: OnFault = ignore_fault) -> None:
    """Load the model into the target folder. Raises `FetchError`.

    `on_fault` is called with a fault at once; it is raised when the running downloads are over, which may take hours.
    """
    source = in_full(settings.source)
    kind = _kind(source)
    try:
        if settings.kernels is not None:
            settings.kernels.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_disk(error) from error
    cache = ModelCache(settings.target.parent, settings.size_limit_bytes, evicts=settings.evicts)
    cache.fetch(
        kind,
        source,
        report,
        name=settings.target.name,
        num_downloads=settings.num_downloads,
        watch=Watch(on_fault),
    )


def _kind(source: str) -> SourceKind:
    try:
        kind = find_kind(source)
        kind.check(source, "model.source")
    except SourceError as error:
        raise FetchError("SourceUnsupported", error.message) from error
    if not kind.is_remote:
        message = f"`{source}` is on the node or on a claim already and needs no cache: remove spec.model.cache."
        raise FetchError("SourceUnsupported", message)
    return kind
