"""The model's folder on its volume: filled beside its final place and moved there in one step once it is complete.

A folder in its final place is complete: later loaders have nothing to do, and engines never see half a model. Loaders
of the same folder wait for each other; one that was killed leaves its part files for the next.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from pagemill_engine.loader.errors import LoaderError
from pagemill_engine.loader.selection import RemoteFile

PART = ".part"
SPARE_BYTES = 16 * 1024 * 1024
"""Reserve for names and metadata."""
MAX_NEIGHBOURS = 8
"""Folders that a message names."""


class ModelFolder:
    def __init__(self, target: Path) -> None:
        self.target = target
        self.staging = target.with_name(f".{target.name}.loading")
        """Where files lie until all are there."""
        self._lock = target.with_name(f".{target.name}.lock")

    @property
    def complete(self) -> bool:
        return self.target.is_dir()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other loader works on this folder meanwhile. Raises `OSError`."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("w") as lock:
            # Volumes that know no locks are written by one pod at a time anyway.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def begin(self, commit: str) -> None:
        """Keep what an earlier run has fetched of the same commit; forget anything else."""
        stamp = self.staging / ".commit"
        if not stamp.is_file() or stamp.read_text() != commit:
            shutil.rmtree(self.staging, ignore_errors=True)
            self.staging.mkdir(parents=True)
            stamp.write_text(commit)

    def check_room(self, files: Sequence[RemoteFile]) -> None:
        """Raises `LoaderError` when what is still to be fetched does not fit."""
        missing = sum(file.num_bytes - self._num_bytes_of(file) for file in files)
        free = shutil.disk_usage(self.staging).free
        if missing + SPARE_BYTES > free:
            raise LoaderError(
                "DiskFull",
                f"The model needs {_size(missing)} more, and {self.target.parent} has {_size(free)} left. "
                f"{self._neighbours()}Raise spec.model.cache.size, or use a larger volume.",
            )

    def _neighbours(self) -> str:
        """What else takes room: models of earlier sources or of others who share the volume, and parts of such."""
        own = (self.target, self.staging)
        folders = [path for path in sorted(self.target.parent.iterdir()) if path.is_dir() and path not in own]
        sizes = {path.name: num_bytes for path in folders if (num_bytes := _num_bytes_below(path))}
        if not sizes:
            return ""
        names = ", ".join(f"{name} ({_size(num_bytes)})" for name, num_bytes in list(sizes.items())[:MAX_NEIGHBOURS])
        return f"The volume also holds models of other sources: {names}; delete the folders that are not used. "

    def part(self, file: RemoteFile) -> Path:
        path = self.staging / f"{file.path}{PART}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > file.num_bytes:
            path.unlink()
        return path

    def has(self, file: RemoteFile) -> bool:
        return (self.staging / file.path).is_file()

    def accept(self, file: RemoteFile) -> None:
        """The part file is whole and right. Raises `LoaderError`; the next run fetches it again then."""
        part = self.part(file)
        with part.open("rb") as content:
            num_bytes = os.fstat(content.fileno()).st_size
            is_whole = num_bytes == file.num_bytes and _is_right(content, file)
            os.fsync(content.fileno())
        if not is_whole:
            part.unlink()
            what = f"{num_bytes} bytes, not {file.num_bytes}" if num_bytes != file.num_bytes else "other content"
            raise LoaderError("ModelCorrupt", f"`{file.path}` arrived damaged: {what}. It will be fetched again.")
        os.replace(part, self.staging / file.path)

    def publish(self) -> None:
        (self.staging / ".commit").unlink()
        os.replace(self.staging, self.target)
        folder = os.open(self.target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _num_bytes_of(self, file: RemoteFile) -> int:
        """Bytes of the file that are already here."""
        for path in (self.staging / file.path, self.staging / f"{file.path}{PART}"):
            if path.is_file():
                return min(file.num_bytes, path.stat().st_size)
        return 0


def _is_right(content: BufferedReader, file: RemoteFile) -> bool:
    """Whether the digest that the hub publishes, if any, matches."""
    if file.sha256 is not None:
        return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256
    if file.git_sha1 is None:
        return True
    # How git names a blob; it guards against damage, not against forgery.
    header = hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)
    return hashlib.file_digest(content, lambda: header).hexdigest() == file.git_sha1


def _num_bytes_below(folder: Path) -> int:
    """As far as it can be read."""
    num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                num_bytes += os.lstat(os.path.join(parent, name)).st_size
    return num_bytes


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.1f} GiB" if num_bytes >= 1024**3 else f"{num_bytes / 1024**2:.0f} MiB"
