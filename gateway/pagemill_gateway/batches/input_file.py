"""The input file of one batch: its checked lines, in passes of constant memory, and the request of one line.

The first pass records what the file was. A later pass, or a line read again, that finds something else raises
`InputChanged`, because results of a changed file would be credited to the wrong lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import msgspec

from pagemill_gateway.batches.lines import BrokenLine, Line, LineChecker, body_of, scan_lines
from pagemill_gateway.batches.objects import Batch, BatchFile, LineFault
from pagemill_gateway.batches.store import BatchStore


class InputChanged(Exception):
    """The input file is not what it was: deleted, cut, or written to."""

    def __init__(self, fault: LineFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class InputFile:
    def __init__(self, batch: Batch, store: BatchStore, max_line_bytes: int) -> None:
        """`batch.input_digest` is set by the first whole pass."""
        self._batch = batch
        self._store = store
        self._max_line_bytes = max_line_bytes

    async def lines(self) -> AsyncIterator[Line | BrokenLine]:
        """Yield all lines. Raises `InputChanged` at the end if the file is not the one of the first pass."""
        checker = LineChecker(self._batch.endpoint, self._max_line_bytes)
        hashed, num_bytes = hashlib.blake2b(digest_size=16), 0

        async def read(offset: int, size: int) -> bytes:
            nonlocal num_bytes
            piece = await self._store.read(self._batch.input_file_id, offset, size)
            hashed.update(piece)
            num_bytes += len(piece)
            return piece

        async for line in scan_lines(read, self._max_line_bytes):
            yield checker.check(line)
        await self._compare(hashed.hexdigest(), num_bytes)

    async def request(self, line: Line) -> bytes:
        """Return the request of a line. Raises `InputChanged`."""
        text = await self._store.read(self._batch.input_file_id, line.offset, line.num_bytes)
        body = body_of(text, line.custom_id)
        if body is None:
            raise await self._changed()
        return body

    async def _compare(self, digest: str, num_bytes: int) -> None:
        batch = self._batch
        raw = await self._store.get("files", batch.account, batch.input_file_id)
        if raw is None or msgspec.json.decode(raw, type=BatchFile).bytes != num_bytes:
            raise await self._changed()
        if batch.input_digest not in ("", digest):
            raise await self._changed()
        batch.input_digest = digest

    async def _changed(self) -> InputChanged:
        batch = self._batch
        if await self._store.get("files", batch.account, batch.input_file_id) is None:
            return InputChanged(LineFault("input_file_not_found", "The input file was deleted."))
        message = "The content of the input file is not what was uploaded. Upload it again, and create a new batch."
        return InputChanged(LineFault("input_file_changed", message))
