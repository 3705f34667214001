"""The output file and the error file of one batch while it runs: which lines have results, and how new ones are added.

A result is one line, which begins with an id that ends with the number of the input line. An answer is copied into its
result in pieces, unparsed. A line that a crash left unfinished is removed when the files are loaded, and nothing is
appended behind one that a full disk left unfinished.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

import msgspec
import orjson

from pagemill_gateway.batches.answer_file import PIECE_BYTES, AnswerFile
from pagemill_gateway.batches.line_memory import ResultSpace
from pagemill_gateway.batches.line_sender import LineReply
from pagemill_gateway.batches.lines import scan_lines
from pagemill_gateway.batches.objects import Batch, BatchFile, LineFault
from pagemill_gateway.batches.store import BatchStore, Lease, finished
from pagemill_protocol.errors import unavailable
from pagemill_protocol.json_pieces import on_one_line

OUTPUT, ERRORS = 0, 1
NUM_FAULTS_AT_ONCE = 500
HEADROOM_BYTES = 64 * 1024 * 1024
"""What is left for faults of lines in a file that can take no further answers, because a store limits its size."""
TOO_MANY_BYTES = LineFault(
    "too_many_file_bytes",
    "There is no space for the answer: all files and results together would exceed the gateway's setting "
    "batches.max_tenant_bytes, or the results the largest file of its store. Delete some files, or send smaller "
    "batches.",
)
_ID = re.compile(rb'\{"id":"batch_req_[0-9a-f]+_([0-9]+)"')
_HEAD_BYTES = 128


class ResultFiles:
    def __init__(self, batch: Batch, store: BatchStore, lease: Lease, space: ResultSpace) -> None:
        self._batch = batch
        self._store = store
        self._lease = lease
        self._space = space
        self._ids = (batch.output_file_id, batch.error_file_id)
        self._locks = (asyncio.Lock(), asyncio.Lock())
        self._sizes = [0, 0]
        self._is_torn = [False, False]
        """Whether the end of each file is a line that could not be completed."""
        self.done: set[int] = set()
        """The numbers of the lines that have results."""

    async def load(self) -> None:
        """Find the results of earlier processes, and update the batch's counts."""
        counts = [0, 0]
        for place, file_id in enumerate(self._ids):
            await self._store.trim(file_id)
            async for line in scan_lines(partial(self._store.read, file_id), _HEAD_BYTES):
                found = _ID.match(line.beginning)
                if found is not None:
                    self.done.add(int(found[1]))
                    counts[place] += 1
                self._sizes[place] = line.offset + line.num_bytes + 1
        self._batch.num_completed, self._batch.num_failed = counts
        self._space.num_left -= sum(self._sizes)

    def line_id(self, number: int) -> str:
        return f"batch_req_{self._batch.id.removeprefix('batch_')}_{number}"

    @property
    def max_answer_bytes(self) -> int:
        """The largest answer that there is space for."""
        return max(0, min(self._space.num_left, self._store.max_content_bytes - HEADROOM_BYTES - max(self._sizes)))

    async def add_answer(self, number: int, custom_id: str, reply: LineReply, body: AnswerFile) -> None:
        """Append the answer of one line; it goes on to its end if this task is cancelled."""
        fields = {"id": self.line_id(number), "custom_id": custom_id}
        response = {"status_code": reply.status, "request_id": self.line_id(number)}
        head = on_one_line(orjson.dumps(fields))[:-1] + b',"response":' + orjson.dumps(response)[:-1] + b',"body":'
        end, is_json = b'},"error":null}\n', reply.is_json and body.num_bytes > 0
        num_bytes = len(head) + len(end) + body.num_bytes
        if body.is_too_large or num_bytes > self.max_answer_bytes or not self._space.take(num_bytes):
            await self.add_faults([(number, custom_id, TOO_MANY_BYTES)])
            return

        async def pieces() -> AsyncIterator[bytes]:
            joined = bytearray(head)
            if not is_json:
                joined += b"null"
            else:
                async for piece in body.pieces():
                    joined += piece
                    if len(joined) > PIECE_BYTES:
                        yield bytes(joined)
                        joined.clear()
            yield bytes(joined + end)

        await finished(self._append(OUTPUT if reply.ok else ERRORS, [number], pieces()))

    async def add_faults(self, faults: Sequence[tuple[int, str | None, LineFault]]) -> None:
        """Append the faults of lines without answers. They are small and few, and always have space."""
        for start in range(0, len(faults), NUM_FAULTS_AT_ONCE):
            some = faults[start : start + NUM_FAULTS_AT_ONCE]
            data = b"".join(on_one_line(orjson.dumps(self._fault(*each))) + b"\n" for each in some)
            await finished(self._append(ERRORS, [each[0] for each in some], _whole(data)))

    async def register(self) -> None:
        """Make the files visible to clients, those that are not empty."""
        batch, names = self._batch, ("output", "error")
        for place, file_id in enumerate(self._ids):
            if size := self._sizes[place]:
                name, now = f"{batch.id}_{names[place]}.jsonl", int(time.time())
                file = BatchFile(id=file_id, bytes=size, created_at=now, filename=name, purpose="batch_output")
                await self._store.put("files", batch.account, file_id, msgspec.json.encode(file), self._lease)
        batch.has_output, batch.has_errors = (size > 0 for size in self._sizes)

    async def _append(self, place: int, numbers: Sequence[int], pieces: AsyncIterator[bytes]) -> None:
        async with self._locks[place]:
            if self._is_torn[place]:
                raise unavailable("A result could not be written.", code="store_unavailable")
            self._is_torn[place] = True
            async for piece in pieces:
                await self._store.append(self._ids[place], piece, self._lease)
                self._sizes[place] += len(piece)
            self._is_torn[place] = False
            self.done.update(numbers)
            if place == OUTPUT:
                self._batch.num_completed += len(numbers)
            else:
                self._batch.num_failed += len(numbers)

    def _fault(self, number: int, custom_id: str | None, fault: LineFault) -> dict[str, object]:
        error = {"code": fault.code, "message": fault.message, "line": number}
        return {"id": self.line_id(number), "custom_id": custom_id, "response": None, "error": error}


async def _whole(data: bytes) -> AsyncIterator[bytes]:
    yield data
