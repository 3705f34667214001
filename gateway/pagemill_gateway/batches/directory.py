"""Stores files and batches in a directory of one machine, or of a volume whose file locks work across gateways.

Each record is a file that is replaced as a whole. A lease is a file lock, which the kernel releases with its process.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pagemill_gateway.batches.store import Kind, Lease
from pagemill_gateway.config import SettingsError
from pagemill_protocol.errors import unavailable

TAIL_BYTES = 1024 * 1024
Result = TypeVar("Result")


class DirectoryStore:
    def __init__(self, directory: str) -> None:
        """Create the directory. Raises `SettingsError` if it cannot be written."""
        self._root = Path(directory)
        try:
            for name in ("content", "leases"):
                (self._root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
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
            new.write_bytes(value)
            new.replace(path)

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

        def lock() -> Lease | None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            return _Lock(descriptor)

        return await _in_thread(lock)

    async def close(self) -> None:
        pass

    def _record(self, kind: Kind, account: str, object_id: str) -> Path:
        return self._folder(kind, account) / object_id

    def _folder(self, kind: Kind, account: str) -> Path:
        return self._root / kind / hashlib.sha256(account.encode()).hexdigest()[:32]

    def _content(self, file_id: str) -> Path:
        return self._root / "content" / file_id


class _Lock:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def renew(self) -> None:
        """Do nothing: the lock is valid while the process lives."""

    async def release(self) -> None:
        os.close(self._descriptor)


async def _in_thread(work: Callable[[], Result]) -> Result:
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        raise unavailable(
            f"The directory of files and batches cannot be used: {error.strerror}.", code="store_unavailable"
        ) from error


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
