"""The body of one line's answer until it is complete: in memory while it is small, in an unnamed file beyond.

An unnamed file needs no cleaning: it is gone with its process, however that ends.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator
from types import TracebackType

from pagemill_gateway.batches.store import store_failure
from pagemill_protocol.json_pieces import OneLine

MEMORY_BYTES = 64 * 1024
PIECE_BYTES = 256 * 1024


class AnswerFile:
    """A context manager that frees the body at its end."""

    def __init__(self, directory: str | None, max_bytes: int) -> None:
        """`directory` is for bodies beyond `MEMORY_BYTES`; `None`: that of this machine's temporary files."""
        self._file = tempfile.SpooledTemporaryFile(MEMORY_BYTES, dir=directory)  # noqa: SIM115 - closed by __exit__
        self._lock = threading.Lock()
        """Held while the file is written or closed: a write goes on in its thread when its task is cancelled."""
        self._max_bytes = max_bytes
        self._line = OneLine()
        self.num_bytes = 0
        self.is_too_large = False
        """Whether the body had more than the permitted bytes. Then it is incomplete."""

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._file.close()

    async def write(self, data: bytes) -> None:
        """Append data, up to the limit. Raises `PagemillError` 503 if the disk is full."""
        data = self._line.push(data)
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            self.is_too_large = True
            return
        try:
            if self.num_bytes <= MEMORY_BYTES:
                self._write(data)
            else:
                await asyncio.to_thread(self._write, data)
        except OSError as error:
            raise store_failure(error) from error

    def _write(self, data: bytes) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write(data)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as one line of a file: line breaks in JSON are blanks between its values.

        A character that the body does not complete is left out: such a body is no JSON.
        """
        self._file.seek(0)
        while piece := await self._read():
            yield piece.replace(b"\n", b" ").replace(b"\r", b" ")

    def clear(self) -> None:
        """Forget the body, before another attempt."""
        self._file.seek(0)
        self._file.truncate()
        self._line.flush()
        self.num_bytes, self.is_too_large = 0, False

    async def _read(self) -> bytes:
        if self.num_bytes <= MEMORY_BYTES:
            return self._file.read(PIECE_BYTES)
        return await asyncio.to_thread(self._file.read, PIECE_BYTES)
