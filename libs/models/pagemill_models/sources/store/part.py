"""A file while it is fetched: arriving bytes are hashed, and written to disk while the rest is still arriving.

A complete file therefore needs neither another pass for its digest nor a long wait for the disk. Repositories append to
it as to any file; `folder` decides on its path and its use.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Protocol

from pagemill_models.sources.base import RemoteFile
from pagemill_protocol.source_errors import FetchError

SYNC_BYTES = 32 * 1024 * 1024
"""Unwritten bytes after which writing to disk is started."""
READ_BYTES = 1024 * 1024


class Digest(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class PartFile(io.FileIO):
    """A file positioned at its end; the part that an earlier run left is read for the digest."""

    def __init__(self, path: Path, file: RemoteFile) -> None:
        super().__init__(path, "ab+")
        self._path, self._most_bytes = file.path, file.num_bytes
        self._new_digest = _digest_of(file)
        self._digest = self._new_digest()
        self._hash_from_start()
        self._num_unsynced = 0
        self._syncing: Future[None] | None = None
        self._syncs = ThreadPoolExecutor(1, thread_name_prefix="sync")

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.fileno()).st_size

    def write(self, data: object, /) -> int:
        """Append all of the data, while a plain file may write less."""
        content = memoryview(data).cast("B")  # type: ignore[arg-type]
        if self.tell() + len(content) > self._most_bytes:
            raise FetchError("ModelCorrupt", f"`{self._path}` is longer than the {self._most_bytes} bytes announced.")
        written = 0
        while written < len(content):
            written += super().write(content[written:]) or 0
        self._digest.update(content)
        self._num_unsynced += written
        if self._num_unsynced >= SYNC_BYTES and self._is_synced():
            self._num_unsynced = 0
            self._syncing = self._syncs.submit(os.fdatasync, self.fileno())
        return written

    def truncate(self, size: int | None = None, /) -> int:
        """Truncate the file, such as for a server without ranges, which sends it from the first byte again."""
        size = super().truncate(size)
        self._digest = self._new_digest()
        self._hash_from_start()
        return size

    def hexdigest(self) -> str:
        """Return the digest of the kind that the source publishes for this file."""
        return self._digest.hexdigest()

    def sync(self) -> None:
        """Wait until everything is on disk. Raises `OSError`, also for earlier background writes."""
        if self._syncing is not None:
            self._syncing.result()
        os.fsync(self.fileno())

    def close(self) -> None:
        if not self.closed:
            self._syncs.shutdown()
        super().close()

    def __enter__(self) -> PartFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_synced(self) -> bool:
        """Whether no background write is running. The system reports a failed write only once, so each result is
        checked."""
        if self._syncing is None:
            return True
        if not self._syncing.done():
            return False
        self._syncing.result()
        return True

    def _hash_from_start(self) -> None:
        self.seek(0)
        while chunk := self.read(READ_BYTES):
            self._digest.update(chunk)


def _digest_of(file: RemoteFile) -> Callable[[], Digest]:
    if file.git_sha1 is None or file.sha256 is not None:
        return hashlib.sha256
    # Git's name of a blob; it protects against damage, not against forgery.
    return lambda: hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)
