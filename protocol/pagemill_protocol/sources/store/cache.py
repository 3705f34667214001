"""Many models below one folder, within a limit: a missing model is fetched, and the longest unused ones go for it.

Processes of one node share it. Each model has a lock for filling it, and its record one for using it; what is used, or
being filled, is never removed. Nothing else may lie in the folder but hidden files and what its owner adds.
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

from pagemill_protocol.arriving_files import arriving_folder
from pagemill_protocol.source_errors import FetchError
from pagemill_protocol.sources.base import SourceKind
from pagemill_protocol.sources.store.faults import MAKE_ROOM, explain_disk, size_text
from pagemill_protocol.sources.store.fetch import UNWATCHED, Fetch, Report, Watch
from pagemill_protocol.sources.store.folder import ModelFolder
from pagemill_protocol.sources.store.record import HOLDS, NAME, is_in_use

SPARE_BYTES = 16 * 1024 * 1024
"""Reserve for names and metadata."""
MAX_NEIGHBOURS = 8
"""Folders that a message names."""
NAME_CHARS = 16
LOADING = ".loading"


class Entry(NamedTuple):
    """A model, or the parts of one that are not fetched any more."""

    path: Path
    num_bytes: int
    used_at: float


def entry_name(source: str) -> str:
    """Folder of a source in a machine's cache."""
    return hashlib.blake2b(source.encode(), digest_size=16).hexdigest()[:NAME_CHARS]


class ModelCache:
    def __init__(self, root: Path, limit_bytes: int | None = None, *, evicts: bool = True) -> None:
        """`limit_bytes`: of all models together; `None`: what the disk has. Without `evicts` nothing is removed."""
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
    ) -> Path:
        """The folder with the model of a remote source, which this process uses until it ends. Raises `FetchError`.

        `name`: of its folder.
        """
        folder = ModelFolder(self.root / (name or entry_name(source)))
        try:
            if folder.complete:
                HOLDS.hold(folder.target)
                report(event="complete", source=source)
                return folder.target
            with folder.alone():
                if not folder.complete:  # another process was here meanwhile
                    Fetch(kind, source, folder, self._make_room, num_downloads, report, watch).run()
                HOLDS.hold(folder.target)
        except OSError as error:
            raise explain_disk(error) from error
        report(event="loaded", source=source)
        return folder.target

    def has(self, source: str) -> bool:
        return ModelFolder(self.root / entry_name(source)).complete

    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._entries())

    def _make_room(self, folder: ModelFolder, missing_bytes: int) -> None:
        """Raises `FetchError` when what is still to be fetched does not fit, whatever is removed."""
        with self._alone():
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
                shutil.rmtree(arriving_folder(entry.path), ignore_errors=True)  # of a process that ended before ready
                os.replace(entry.path, away)  # it disappears in one step
                shutil.rmtree(away)
                return True
        return False

    def _is_free(self, path: Path) -> bool:
        """A model without a record was fetched by an earlier version, which does not say whether it is in use."""
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
            f"{self.root} has {size_text(free)} left. {self._neighbours(folder)}{MAKE_ROOM}.",
        )

    def _neighbours(self, folder: ModelFolder) -> str:
        """What else takes room: models of earlier sources or of others who share the volume, and parts of such."""
        own = (folder.target, folder.staging)
        sizes = {entry.path.name: entry.num_bytes for entry in self._entries() if entry.path not in own}
        named = [f"{name} ({size_text(size)})" for name, size in sorted(sizes.items()) if size]
        if not named:
            return ""
        why = "in use, or of an earlier version" if self._evicts else "delete the folders that are not used"
        return f"The volume also holds models of other sources: {', '.join(named[:MAX_NEIGHBOURS])}; {why}. "

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.root / ".room.lock").open("w") as lock:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _num_bytes_below(folder: Path) -> int:
    """As far as it can be read."""
    num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                num_bytes += os.lstat(os.path.join(parent, name)).st_size
    return num_bytes
