"""The record of a complete model's folder: sizes and digests of its files, and who uses it now.

A process that reads the model keeps a shared lock on the record's file, so that no other process removes the folder;
the file's modification time is the last use.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

NAME = ".pagemill-model.json"


class StoredFile(msgspec.Struct, frozen=True):
    path: str
    num_bytes: int
    sha256: str
    modified_ns: int


class ModelRecord(msgspec.Struct, frozen=True):
    source: str
    version: str
    files: list[StoredFile]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class SharedLocks:
    """Shared locks of this process, kept until it ends."""

    def __init__(self) -> None:
        self._held: dict[Path, BinaryIO] = {}
        self._lock = threading.Lock()

    def acquire(self, folder: Path) -> None:
        """Lock a folder; does nothing without a record or on a file system without locks."""
        with self._lock, suppress(OSError):
            if folder in self._held:
                return
            file = (folder / NAME).open("rb")
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                file.close()
                raise
            self._held[folder] = file
            os.utime(folder / NAME)

    def release(self) -> None:
        with self._lock:
            for file in self._held.values():
                file.close()
            self._held.clear()


SHARED_LOCKS = SharedLocks()
atexit.register(SHARED_LOCKS.release)
# Made at import by one thread: msgspec 0.22 crashes when several threads are the first to decode the type.
_decoder = msgspec.json.Decoder(ModelRecord)


def write_record(folder: Path, source: str, version: str, sha256: dict[str, str]) -> None:
    """Write the record. `sha256`: known digests by path; the other files are read."""
    files = [_stored(folder, path, sha256) for path in sorted(folder.rglob("*")) if path.is_file()]
    (folder / NAME).write_bytes(msgspec.json.encode(ModelRecord(source, version, files)))


def read_record(folder: Path) -> ModelRecord | None:
    """Return the record, or None if it is missing or unreadable."""
    try:
        return _decoder.decode((folder / NAME).read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None


def is_intact(folder: Path) -> bool:
    """Whether all files are unchanged since they were fetched.

    A file of the same size and time is trusted; the digest of a file that was written since is compared. A folder of an
    earlier version has no record and is trusted.
    """
    record = read_record(folder)
    if record is None:
        return not (folder / NAME).exists()
    return all(_is_same(folder / file.path, file) for file in record.files)


def is_in_use(folder: Path) -> bool:
    """Whether another process has locked the folder."""
    try:
        with (folder / NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _stored(folder: Path, path: Path, sha256: dict[str, str]) -> StoredFile:
    name, status = str(path.relative_to(folder)), path.stat()
    digest = sha256.get(name) or file_sha256(path)
    return StoredFile(name, status.st_size, digest, status.st_mtime_ns)


def _is_same(path: Path, file: StoredFile) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    if status.st_size != file.num_bytes:
        return False
    return status.st_mtime_ns == file.modified_ns or file_sha256(path) == file.sha256


def file_sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
