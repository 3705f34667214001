"""One fetch of a model: list, select, evict, fetch, check, publish. `config.json` and the index come first: files of
encoders alone are not fetched.

Several files are fetched at once. An interrupted download is resumed, as long as bytes keep arriving. A loader may
begin as soon as everything but the weights has arrived; these are then fetched in order, fewer at once, so that the
first ones are complete sooner.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from pagemill_models.adapters.limits import ADAPTER_CONFIG
from pagemill_models.declaration.config_values import CONFIG_FILE
from pagemill_models.files.partial_download import FileLink, PartialDownload
from pagemill_models.files.safetensors_header import encoder_files, header_end
from pagemill_models.sources.base import ReadsRanges, RemoteFile, Repository, SourceKind
from pagemill_models.sources.selection import INDEX, select_files
from pagemill_models.sources.store.checks import HEADS, check_complete, check_heads, check_started
from pagemill_models.sources.store.faults import explain_disk
from pagemill_models.sources.store.folder import ModelFolder
from pagemill_models.sources.store.part import PartFile
from pagemill_models.sources.store.reach import check_reachable
from pagemill_protocol.source_errors import FetchError, SourceError

TRANSIENT = frozenset({"HubUnreachable", "SourceUnreachable"})
TRIES = 4
"""Failures in a row without a byte."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
MOST_WAITS, LONGEST_WAIT_S = 20, 300.0
"""Waits in a row that a server asks for with `Retry-After`, and the longest one."""
PROGRESS_S = 1.0
FIRST_BYTES = 256 * 1024
"""Bytes read first from a weight file: most headers are shorter."""
MIN_FILES_IN_ORDER = 2
"""Weight files fetched at once while the model is loaded: one may arrive while another is written to disk."""

T = TypeVar("T")
Evict = Callable[[ModelFolder, int], None]
Select = Callable[[str, str | None, Sequence[RemoteFile]], list[RemoteFile]]
"""As `selection.select_files`."""
OnFault = Callable[[FetchError], None]
OnOpen = Callable[[Path], None]


class Report(Protocol):
    def __call__(self, **fields: object) -> None: ...


def ignore_fault(fault: FetchError) -> None:
    """Do nothing: the fault is raised later."""


class Watch(NamedTuple):
    """Callbacks before the end of a fetch."""

    on_fault: OnFault = ignore_fault
    """Receives a fault at once; it is raised when the running downloads have ended, which may take hours."""
    on_open: OnOpen | None = None
    """Receives a folder of `partial_download` with everything but the weights; not called where these are one file."""


UNWATCHED = Watch()


class Fetch:
    def __init__(
        self,
        kind: SourceKind,
        source: str,
        folder: ModelFolder,
        evict: Evict,
        num_downloads: int,
        report: Report,
        watch: Watch,
        select: Select = select_files,
    ) -> None:
        self._select = select
        self._kind = kind
        self._source = source
        self._folder = folder
        self._evict = evict
        self._num_downloads = num_downloads
        self._report = report
        self._watch = watch
        self._ends = threading.Event()

    def run(self) -> None:
        """Fetch the model and publish its folder. Raises `FetchError` or `OSError`."""
        with _as_fetch_error():
            repository = self._kind.open(self._source)
            check_reachable(self._kind, self._source)
        with closing(repository):
            self._run(repository)

    def _run(self, repository: Repository) -> None:
        with _as_fetch_error():
            listing = self._patiently(repository.list_files)
            files = self._select(repository.name, self._kind.file_of(self._source), listing.files)
        self._repository, self._version = repository, listing.version
        self._folder.begin(listing.version)
        heads = [file for file in files if file.path in HEADS]
        # Only the index says which weights are needed.
        known = heads if any(file.path == INDEX for file in heads) else files
        self._evict(self._folder, self._folder.missing_bytes(known))
        self._fetch_heads(heads, {file.path for file in files})
        files = self._needed(files)
        self._evict(self._folder, self._folder.missing_bytes(files))
        total = sum(file.num_bytes for file in files)
        self._report(event="loading", version=listing.version, num_files=len(files), num_bytes=total)
        with self._progress(files, total):
            self._fetch_in_order(files, self._weights_to_load(files))
        self._unpack(files)
        self._folder.publish(self._source, listing.version)

    def _fetch_heads(self, heads: list[RemoteFile], names: set[str]) -> None:
        """Fetch and check the files that describe the model, before its weights. `names`: of all of its files."""
        for file in heads:
            self._fetch(file)
        check_heads(self._folder.staging, names, self._repository.name)

    def _needed(self, files: list[RemoteFile]) -> list[RemoteFile]:
        """Return the files without those of encoders, which the index names."""
        with _as_fetch_error():
            unread = encoder_files(self._folder.staging) if any(file.path == INDEX for file in files) else set()
        return [file for file in files if file.path not in unread]

    def _weights_to_load(self, files: list[RemoteFile]) -> list[RemoteFile]:
        """Return the weights that a loader awaits one by one; none where they are a single file or have no readable
        header."""
        lacking = (file for file in files if file.path.endswith(".safetensors") and not self._folder.has(file))
        weights = sorted(lacking, key=lambda file: file.path)
        is_indexed = any(file.path == INDEX for file in files)
        readable = isinstance(self._repository, ReadsRanges) and is_indexed
        return weights if self._watch.on_open is not None and readable and len(weights) > 1 else []

    def _fetch_in_order(self, files: list[RemoteFile], weights: list[RemoteFile]) -> None:
        """Fetch all files; `weights` last, for a loader that gets the folder before."""
        self._fetch_in_parallel(self._fetch, (file for file in files if file not in weights), self._num_downloads)
        if not weights:
            return
        self._fetch_in_parallel(self._begin, weights, self._num_downloads)
        assert isinstance(self._repository, ReadsRanges)
        assert self._watch.on_open is not None
        try:
            arriving = PartialDownload(self._folder.target, {file.path: self._link(file) for file in files})
        except OSError:  # a volume without hard links: no loader begins early
            self._fetch_in_parallel(self._fetch, weights, self._num_downloads)
            return

        def fetch(file: RemoteFile) -> None:
            self._fetch(file)
            arriving.mark_complete(file.path)

        num_files = max(MIN_FILES_IN_ORDER, self._num_downloads // self._repository.connections)
        if self._repository.connections > 1:  # keep the total number of connections equal
            self._repository.connections = self._repository.connections * self._num_downloads // num_files
        with closing(arriving):
            self._watch.on_open(arriving.folder)
            self._fetch_in_parallel(fetch, weights, num_files, arriving.close)

    def _link(self, file: RemoteFile) -> FileLink:
        return FileLink(self._folder.place(file), file.num_bytes, self._folder.has(file))

    def _fetch_in_parallel(
        self,
        fetch: Callable[[RemoteFile], None],
        files: Iterable[RemoteFile],
        num_downloads: int,
        on_reported: Callable[[], None] = lambda: None,
    ) -> None:
        """Fetch files on threads; the first fault ends the fetch.

        `on_reported`: called after a fault was reported, while other downloads end.
        """
        # The folder stays locked until all writers have finished.
        with ThreadPoolExecutor(num_downloads) as pool:
            downloads = [pool.submit(fetch, file) for file in files]
            wait(downloads, return_when=FIRST_EXCEPTION)
            fault = next((done.exception() for done in downloads if done.done() and done.exception()), None)
            if fault is None:
                return
            self._ends.set()
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(fault, FetchError):
                self._watch.on_fault(fault)
            elif isinstance(fault, OSError):
                self._watch.on_fault(explain_disk(fault))
            on_reported()
            raise fault

    def _fetch(self, file: RemoteFile) -> None:
        if self._folder.has(file):
            return
        with self._folder.part(file) as part:
            self._complete(file, part)
            self._folder.accept(file, part)
        check_complete(self._folder.staging / file.path, file.path, self._repository.name)
        self._report(event="file", path=file.path, num_bytes=file.num_bytes)

    def _begin(self, file: RemoteFile) -> None:
        """Fetch the header of a weight file."""
        if self._folder.has(file):
            return
        with self._folder.part(file) as part:
            self._until(lambda: _header_is_there(file, part), part, lambda: self._append_header(file, part))
        check_started(self._folder.place(file), file, self._repository.name)

    def _append_header(self, file: RemoteFile, part: PartFile) -> None:
        assert isinstance(self._repository, ReadsRanges)
        start = part.num_bytes
        wanted = FIRST_BYTES if start < 8 else header_end(os.pread(part.fileno(), 8, 0)) - start
        part.write(self._repository.read_range(file, self._version, start, wanted))
        if part.num_bytes == start:
            raise self._too_short(file, part)

    def _complete(self, file: RemoteFile, part: PartFile) -> None:
        self._until(lambda: part.num_bytes >= file.num_bytes, part, lambda: self._append(file, part))

    def _until(self, done: Callable[[], bool], part: PartFile, append: Callable[[], None]) -> None:
        """Call `append` until `done`, and again after failures as long as bytes keep arriving."""
        pauses = _Pauses()
        while not done():
            before = part.num_bytes
            try:
                append()
            except FetchError as error:
                if error.reason == "SourceChanged":
                    self._folder.forget()
                if part.num_bytes > before:
                    pauses = _Pauses()
                pause_s = pauses.after(error)
                if pause_s is None or self._ends.wait(pause_s):
                    raise

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Return the result of `ask`, which is called again after failures that may pass."""
        pauses = _Pauses()
        while True:
            try:
                return ask()
            except FetchError as error:
                pause_s = pauses.after(error)
                if pause_s is None or self._ends.wait(pause_s):
                    raise

    def _append(self, file: RemoteFile, part: PartFile) -> None:
        self._repository.fetch(file, self._version, part)
        if part.num_bytes < file.num_bytes:
            raise self._too_short(file, part)

    def _too_short(self, file: RemoteFile, part: PartFile) -> FetchError:
        message = f"{self._repository.name}: `{file.path}` ended after {part.num_bytes} of {file.num_bytes} bytes."
        return FetchError("SourceUnreachable", f"{message} The next try resumes there; check the server's file.")

    def _unpack(self, files: list[RemoteFile]) -> None:
        """Unpack archives in the order of the layers: a later layer replaces files of earlier ones."""
        archives = [file for file in files if file.is_archive]
        for file in archives:
            self._folder.unpack(file)
        if not archives:
            return
        found = [
            path for pattern in (CONFIG_FILE, ADAPTER_CONFIG, "*.gguf") for path in self._folder.staging.rglob(pattern)
        ]
        if not found:
            message = f"{self._repository.name} holds no model: neither `config.json` nor a `.gguf` file in /models."
            raise FetchError("ModelUnreadable", message)

    @contextmanager
    def _progress(self, files: list[RemoteFile], total: int) -> Iterator[None]:
        ended = threading.Event()

        def watch() -> None:
            known = -1
            while not ended.wait(PROGRESS_S):
                done = self._folder.num_bytes(files)
                if done != known:
                    self._report(event="progress", done_bytes=done, total_bytes=total)
                known = done

        thread = threading.Thread(target=watch, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class _Pauses:
    """The pauses between failures in a row, none of which brought a byte."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._num_waits = 0

    def after(self, error: FetchError) -> float | None:
        """Return the seconds until the next try; None if there must be none."""
        if error.reason not in TRANSIENT:
            return None
        if error.retry_after_s is not None:
            self._num_waits += 1
            return min(LONGEST_WAIT_S, error.retry_after_s) if self._num_waits <= MOST_WAITS else None
        self._num_failures += 1
        return _pause_s(self._num_failures) if self._num_failures < TRIES else None


def _pause_s(num_failures: int) -> float:
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**num_failures))


def _header_is_there(file: RemoteFile, part: PartFile) -> bool:
    """Whether the header has arrived, or is invalid because it would be longer than the file."""
    end = header_end(os.pread(part.fileno(), 8, 0)) if part.num_bytes >= 8 else 8
    return end <= part.num_bytes or file.num_bytes < end


@contextmanager
def _as_fetch_error() -> Iterator[None]:
    try:
        yield
    except FetchError:
        raise
    except SourceError as error:
        raise FetchError(error.reason, error.message) from error
