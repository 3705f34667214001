"""Stores files and batches in a directory of one machine, or of a volume whose file locks work across gateways.

Each record is a file that is replaced as a whole. A lease is a file lock, which the kernel releases with its process.
What a process that died left behind is removed at the next start.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pagemill_gateway.batches.store import Kind, Lease, finished, store_failure
from pagemill_gateway.config import SettingsError

TAIL_BYTES = 1024 * 1024
UNFINISHED_AGE_S = 3600.0
"""The age of a record that is not complete, after which no process writes it any more."""
Result = TypeVar("Result")


class DirectoryStore:
    max_content_bytes = 2**62

    def __init__(self, directory: str) -> None:
        """Create the directory. Raises `SettingsError` if it cannot be written."""
        self._root = Path(directory)
        self.scratch_directory: str | None = directory
        try:
            for name in ("content", "leases"):
                (self._root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_leftovers()
        except OSError as error:
            raise SettingsError(
                f"batches.directory: cannot use {directory}: {error.strerror}. Name a directory that the gateway may "
                "write to."
            ) from error

    async def put(self, kind: Kind, account: str, object_id: str, value: bytes, lease: Lease | None = None) -> None:
        path = self._record(kind, account, object_id)

        def write() -> None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = path.with_name(f".{object_id}.{secrets.token_hex(4)}")
            try:
                new.write_bytes(value)
                new.replace(path)
            except OSError:
                _removed(new)
                raise

        await _in_thread(write)

    async def get(self, kind: Kind, account: str, object_id: str) -> bytes | None:
        return await _in_thread(lambda: _bytes_of(self._record(kind, account, object_id)))

    async def all(self, kind: Kind, account: str) -> dict[str, bytes]:
        folder = self._folder(kind, account)

        def read() -> dict[str, bytes]:
            names = sorted(each for each in os.listdir(folder) if not each.startswith(".")) if folder.is_dir() else []
            found = {name: _bytes_of(folder / name) for name in names}
            return {name: value for name, value in found.items() if value is not None}

        return await _in_thread(read)

    async def remove(self, kind: Kind, account: str, object_id: str) -> bool:
        return await _in_thread(lambda: _removed(self._record(kind, account, object_id)))

    async def append(self, file_id: str, data: bytes, lease: Lease | None = None) -> None:
        def write() -> None:
            with self._content(file_id).open("ab") as file:
                file.write(data)

        await _in_thread(write)

    async def read(self, file_id: str, offset: int, size: int) -> bytes:
        def read() -> bytes:
            with suppress(FileNotFoundError), self._content(file_id).open("rb") as file:
                file.seek(offset)
                return file.read(size)
            return b""

        return await _in_thread(read)

    async def remove_content(self, file_id: str) -> None:
        await _in_thread(lambda: _removed(self._content(file_id)))

    async def trim(self, file_id: str) -> None:
        def cut() -> None:
            with suppress(FileNotFoundError), self._content(file_id).open("r+b") as file:
                end = file.seek(0, os.SEEK_END)
                while end:
                    begin = max(0, end - TAIL_BYTES)
                    file.seek(begin)
                    place = file.read(end - begin).rfind(b"\n")
                    if place >= 0:
                        file.truncate(begin + place + 1)
                        return
                    end = begin
                file.truncate(0)

        await _in_thread(cut)

    async def lease(self, batch_id: str) -> Lease | None:
        path = self._root / "leases" / batch_id
        return await _in_thread(lambda: _locked(path))

    async def close(self) -> None:
        pass

    def _remove_leftovers(self) -> None:
        """Remove the lock files of batches that are over and the records that a process did not complete."""
        open_batches = self._folder("open", "")
        for path in (self._root / "leases").iterdir():
            if not (open_batches / path.name).exists() and (lock := _locked(path)) is not None:
                lock.remove()
        for path in self._root.glob("*/*/.*"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > UNFINISHED_AGE_S:
                    _removed(path)

    def _record(self, kind: Kind, account: str, object_id: str) -> Path:
        return self._folder(kind, account) / object_id

    def _folder(self, kind: Kind, account: str) -> Path:
        return self._root / kind / hashlib.sha256(account.encode()).hexdigest()[:32]

    def _content(self, file_id: str) -> Path:
        return self._root / "content" / file_id


class _Lock:
    """A locked file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    async def renew(self) -> None:
        """Do nothing: the lock is valid while the process lives."""

    async def release(self) -> None:
        await _in_thread(self.remove)

    def remove(self) -> None:
        """Remove the file, while no other process can hold its lock, and then unlock it."""
        _removed(self._path)
        os.close(self._descriptor)


def _locked(path: Path) -> _Lock | None:
    """Lock the file, which is created if needed; return `None` if another process holds the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        # The holder before may have removed the file after it was opened here: then another may lock its successor.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return _Lock(path, descriptor)
        os.close(descriptor)


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Return the result of the work, which ends before this call does, even if the task is cancelled.

    A write that went on after its lease was released could replace that of the next holder.
    """
    try:
        return await finished(asyncio.to_thread(work))
    except OSError as error:
        raise store_failure(error) from error


def _bytes_of(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        return None


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
