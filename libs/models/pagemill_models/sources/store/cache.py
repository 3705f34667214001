"""A cache of many models below one folder: missing models are fetched, and the least recently used ones evicted.

Processes of one node share it. Each model has a lock for filling it, and its record a lock for using it; a model in
use, or being filled, is never removed. The folder must contain nothing else but hidden files and its owner's files.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pagemill_models.files.partial_download import partial_folder
from pagemill_models.sources.base import SourceKind
from pagemill_models.sources.selection import select_files
from pagemill_models.sources.store.faults import FREE_SPACE, explain_disk, size_text
from pagemill_models.sources.store.fetch import UNWATCHED, Fetch, Report, Select, Watch
from pagemill_models.sources.store.folder import ModelFolder
from pagemill_models.sources.store.record import NAME, SHARED_LOCKS, is_in_use
from pagemill_protocol.source_errors import FetchError

SPARE_BYTES = 16 * 1024 * 1024
"""Reserve for names and metadata."""
MAX_LISTED_ENTRIES = 8
"""Maximum number of folders that a message names."""
NAME_CHARS = 16
LOADING = ".loading"


class Entry(NamedTuple):
    """A model, or the remains of one that is no longer being fetched."""

    path: Path
    num_bytes: int
    used_at: float


def entry_name(source: str) -> str:
    """Return the name of a source's folder in a machine's cache."""
    return hashlib.blake2b(source.encode(), digest_size=16).hexdigest()[:NAME_CHARS]


class ModelCache:
    def __init__(self, root: Path, limit_bytes: int | None = None, *, evicts: bool = True) -> None:
        """Manage the folder `root`.

        `limit_bytes`: maximum size of all models together; `None`: only the disk limits it. Without `evicts` nothing is
        removed.
        """
        self.root = root
        self._limit_bytes = limit_bytes
        self._evicts = evicts

    def fetch(
        self,
        kind: SourceKind,
        source: str,
        report: Report,
        *,
        name: str | None = None,
        num_downloads: int = 4,
        watch: Watch = UNWATCHED,
        select: Select = select_files,
    ) -> Path:
        """Return the folder with the model of a remote source, which this process uses until it ends. Raises
        `FetchError`.

        `name`: name of the folder; `None`: derived from the source.
        """
        folder = ModelFolder(self.root / (name or entry_name(source)))
        try:
            if folder.complete:
                SHARED_LOCKS.acquire(folder.target)
                report(event="complete", source=source)
                return folder.target
            with folder.locked():
                if not folder.complete:  # another process filled it meanwhile
                    Fetch(kind, source, folder, self._evict_for, num_downloads, report, watch, select).run()
                SHARED_LOCKS.acquire(folder.target)
        except OSError as error:
            raise explain_disk(error) from error
        report(event="loaded", source=source)
        return folder.target

    def has(self, source: str) -> bool:
        return ModelFolder(self.root / entry_name(source)).complete

    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._entries())

    def _evict_for(self, folder: ModelFolder, missing_bytes: int) -> None:
        """Evict models until the missing bytes fit. Raises `FetchError` when they cannot."""
        with self._locked():
            while lack_bytes := self._lack_bytes(missing_bytes):
                if not self._evicts or not self._evict_one(folder):
                    raise self._full(folder, missing_bytes, lack_bytes)

    def _lack_bytes(self, missing_bytes: int) -> int:
        lacks = [missing_bytes + SPARE_BYTES - shutil.disk_usage(self.root).free]
        if self._limit_bytes is not None:
            lacks.append(self.num_bytes() + missing_bytes - self._limit_bytes)
        return max(0, *lacks)

    def _evict_one(self, folder: ModelFolder) -> bool:
        own = (folder.target, folder.staging)
        for entry in sorted(self._entries(), key=lambda entry: entry.used_at):
            if entry.path not in own and self._is_free(entry.path):
                away = entry.path.with_name(f".{entry.path.name.strip('.')}.evicted")
                shutil.rmtree(away, ignore_errors=True)
                shutil.rmtree(
                    partial_folder(entry.path), ignore_errors=True
                )  # left by a process that ended before it was ready
                os.replace(entry.path, away)  # so that the model disappears in one step
                shutil.rmtree(away)
                return True
        return False

    def _is_free(self, path: Path) -> bool:
        """Whether an entry may be evicted.

        A model without a record was fetched by an earlier version, which does not record whether it is in use.
        """
        if not path.name.endswith(LOADING):
            return (path / NAME).is_file() and not is_in_use(path)
        with path.with_name(f"{path.name.removesuffix(LOADING)}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
        return True

    def _entries(self) -> Iterator[Entry]:
        for path in self.root.iterdir():
            is_model = path.is_dir() and not path.name.startswith(".")
            if is_model or path.name.endswith(LOADING):
                with suppress(OSError):
                    mark = path / NAME if (path / NAME).exists() else path
                    yield Entry(path, _num_bytes_below(path), mark.stat().st_mtime)

    def _full(self, folder: ModelFolder, missing_bytes: int, lack_bytes: int) -> FetchError:
        free = shutil.disk_usage(self.root).free
        limit = f" within the limit of {size_text(self._limit_bytes)}" if self._limit_bytes is not None else ""
        return FetchError(
            "DiskFull",
            f"The model needs {size_text(missing_bytes)} more{limit}, {size_text(lack_bytes)} too many: "
            f"{self.root} has {size_text(free)} left. {self._other_entries(folder)}{FREE_SPACE}.",
        )

    def _other_entries(self, folder: ModelFolder) -> str:
        """Return a sentence on other entries: models of earlier sources or of others who share the volume, and
        remains."""
        own = (folder.target, folder.staging)
        sizes = {entry.path.name: entry.num_bytes for entry in self._entries() if entry.path not in own}
        named = [f"{name} ({size_text(size)})" for name, size in sorted(sizes.items()) if size]
        if not named:
            return ""
        why = "in use, or of an earlier version" if self._evicts else "delete the folders that are not used"
        return f"The volume also holds models of other sources: {', '.join(named[:MAX_LISTED_ENTRIES])}; {why}. "

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.root / ".room.lock").open("w") as lock:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _num_bytes_below(folder: Path) -> int:
    """Return the size of all readable files."""
    num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                num_bytes += os.lstat(os.path.join(parent, name)).st_size
    return num_bytes
