"""One fetch from beginning to end: list, select, make room, fetch, check, publish. `config.json` comes first.

Several files are fetched at once. A download that is cut goes on where it stopped, as long as bytes keep coming.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from typing import Protocol

from pagemill_protocol.source_errors import FetchError, SourceError
from pagemill_protocol.sources.base import RemoteFile, Repository, SourceKind
from pagemill_protocol.sources.selection import select_files
from pagemill_protocol.sources.store.checks import CONFIG, HEADS, check_heads, check_whole
from pagemill_protocol.sources.store.faults import explain_disk
from pagemill_protocol.sources.store.folder import ModelFolder
from pagemill_protocol.sources.store.part import PartFile

PASSING = frozenset({"HubUnreachable", "SourceUnreachable"})
TRIES = 4
"""In a row without a byte."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
PROGRESS_S = 1.0

MakeRoom = Callable[[ModelFolder, int], None]
OnFault = Callable[[FetchError], None]


class Report(Protocol):
    def __call__(self, **fields: object) -> None: ...


def ignore_fault(fault: FetchError) -> None:
    """It is raised later."""


class Fetch:
    def __init__(
        self,
        kind: SourceKind,
        source: str,
        folder: ModelFolder,
        make_room: MakeRoom,
        num_downloads: int,
        report: Report,
        on_fault: OnFault,
    ) -> None:
        self._kind = kind
        self._source = source
        self._folder = folder
        self._make_room = make_room
        self._num_downloads = num_downloads
        self._report = report
        self._on_fault = on_fault
        self._ends = threading.Event()

    def run(self) -> None:
        """The folder is complete when it returns. Raises `FetchError`, `OSError`."""
        with _as_fetch_error():
            repository = self._kind.open(self._source)
        with closing(repository):
            self._run(repository)

    def _run(self, repository: Repository) -> None:
        with _as_fetch_error():
            listing = repository.list_files()
            files = select_files(repository.name, self._kind.file_of(self._source), listing.files)
        self._repository, self._version = repository, listing.version
        self._folder.begin(listing.version)
        self._make_room(self._folder, self._folder.missing_bytes(files))
        total = sum(file.num_bytes for file in files)
        self._report(event="loading", version=listing.version, num_files=len(files), num_bytes=total)
        with self._progress(files, total):
            self._fetch_heads(files)
            self._fetch_all(files)
        self._unpack(files)
        self._folder.publish(self._source, listing.version)

    def _fetch_heads(self, files: list[RemoteFile]) -> None:
        """What no engine would load is refused before its weights are fetched."""
        names = {file.path for file in files}
        for file in files:
            if file.path in HEADS:
                self._fetch(file)
        check_heads(self._folder.staging, names, self._repository.name)

    def _fetch_all(self, files: list[RemoteFile]) -> None:
        # The folder stays locked until all writers have finished.
        with ThreadPoolExecutor(self._num_downloads) as pool:
            downloads = [pool.submit(self._fetch, file) for file in files]
            wait(downloads, return_when=FIRST_EXCEPTION)
            fault = next((done.exception() for done in downloads if done.done() and done.exception()), None)
            if fault is None:
                return
            self._ends.set()
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(fault, FetchError):
                self._on_fault(fault)
            elif isinstance(fault, OSError):
                self._on_fault(explain_disk(fault))
            raise fault

    def _fetch(self, file: RemoteFile) -> None:
        if self._folder.has(file):
            return
        with self._folder.part(file) as part:
            self._complete(file, part)
            self._folder.accept(file, part)
        check_whole(self._folder.staging / file.path, file.path, self._repository.name)
        self._report(event="file", path=file.path, num_bytes=file.num_bytes)

    def _complete(self, file: RemoteFile, part: PartFile) -> None:
        failures = 0
        while (before := part.num_bytes) < file.num_bytes:
            try:
                self._append(file, part)
            except FetchError as error:
                failures = 0 if part.num_bytes > before else failures + 1
                if error.reason == "SourceChanged":
                    self._folder.forget()
                if error.reason not in PASSING or failures >= TRIES:
                    raise
                if self._ends.wait(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**failures)):
                    raise

    def _append(self, file: RemoteFile, part: PartFile) -> None:
        self._repository.fetch(file, self._version, part)
        if part.num_bytes < file.num_bytes:
            message = f"{self._repository.name}: `{file.path}` ended after {part.num_bytes} of {file.num_bytes} bytes."
            raise FetchError("SourceUnreachable", f"{message} The next try goes on there; check the server's file.")

    def _unpack(self, files: list[RemoteFile]) -> None:
        """In the order of the layers: a later one replaces what an earlier one holds."""
        archives = [file for file in files if file.is_archive]
        for file in archives:
            self._folder.unpack(file)
        if not archives:
            return
        found = [path for pattern in (CONFIG, "*.gguf") for path in self._folder.staging.rglob(pattern)]
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


@contextmanager
def _as_fetch_error() -> Iterator[None]:
    try:
        yield
    except FetchError:
        raise
    except SourceError as error:
        raise FetchError(error.reason, error.message) from error
