"""One load from beginning to end: look, select, fetch, check, publish. `config.json` comes first, and is checked."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from pagemill_engine.loader import hub
from pagemill_engine.loader.errors import LoaderError
from pagemill_engine.loader.selection import RemoteFile, select_files
from pagemill_engine.loader.settings import LoaderSettings
from pagemill_engine.loader.volume import ModelFolder
from pagemill_protocol.sources import HubModel, SourceError, parse_hub_source
from pagemill_protocol.spec_from_config import check_config

Tell = Callable[..., None]
OnFault = Callable[[LoaderError], None]
CONFIG = "config.json"
REMEDIES = {
    "oci": "Push the weights to a Hugging Face hub or mirror and use `hf://`, or mount them and use `pvc://`.",
    "s3": "Copy the weights to a volume and use `pvc://CLAIM/PATH`, or serve them from a hub mirror and use `hf://`.",
    "pvc": "A claim holds its files already: remove spec.model.cache.",
    "file": "A file of the node needs no cache: remove spec.model.cache.",
    "package": "A file of the image needs no cache: remove spec.model.cache.",
}


def load(settings: LoaderSettings, tell: Tell, on_fault: OnFault = lambda _: None) -> None:
    """Return when the target folder holds the model. Raises `LoaderError`.

    `on_fault` is called with a fault at once; it is raised when the running downloads are over, which may take hours.
    """
    model = _model(settings.source)
    folder = ModelFolder(settings.target)
    try:
        if settings.kernels is not None:
            settings.kernels.mkdir(parents=True, exist_ok=True)
        if folder.complete:
            tell(event="complete", source=settings.source)
            return
        with folder.alone():
            if not folder.complete:  # another loader was here meanwhile
                _fill(model, folder, settings.num_downloads, tell, on_fault)
    except OSError as error:
        raise hub.explain_disk(error) from error
    tell(event="loaded", source=settings.source)


def _model(source: str) -> HubModel:
    scheme = source.partition("://")[0]
    if scheme != "hf":
        remedy = REMEDIES.get(scheme, "Use `hf://ORG/NAME` or `hf://ORG/NAME@REVISION`.")
        raise LoaderError("SourceUnsupported", f"`{source}` cannot be loaded into a cache by this version. {remedy}")
    try:
        return parse_hub_source(source)
    except SourceError as error:
        raise LoaderError("SourceUnsupported", error.message) from error


def _fill(model: HubModel, folder: ModelFolder, num_downloads: int, tell: Tell, on_fault: OnFault) -> None:
    commit, listed = hub.list_files(model)
    files = select_files(model, listed)
    folder.begin(commit)
    folder.check_room(files)
    tell(event="loading", commit=commit, num_files=len(files), num_bytes=sum(file.num_bytes for file in files))

    def fetch(file: RemoteFile) -> None:
        if folder.has(file):
            return
        hub.download(model, file, commit, folder.part(file))
        folder.accept(file)
        tell(event="file", path=file.path, num_bytes=file.num_bytes)

    for file in files:
        if file.path == CONFIG:
            fetch(file)
            _check_config(folder.staging)
    # The folder stays locked until all writers have finished.
    with ThreadPoolExecutor(num_downloads) as pool:
        downloads = [pool.submit(fetch, file) for file in files]
        wait(downloads, return_when=FIRST_EXCEPTION)
        fault = next((done.exception() for done in downloads if done.done() and done.exception()), None)
        if fault is not None:
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(fault, LoaderError | OSError):
                on_fault(fault if isinstance(fault, LoaderError) else hub.explain_disk(fault))
            raise fault
    folder.publish()


def _check_config(folder: Path) -> None:
    """Raises `LoaderError` for a model that no engine of this version would load, before its weights are fetched."""
    try:
        check_config(folder)
    except SourceError as error:
        message = error.message.replace(str(folder / CONFIG), CONFIG).replace(f"`{folder}`", "The model")
        raise LoaderError(error.reason, message) from error
