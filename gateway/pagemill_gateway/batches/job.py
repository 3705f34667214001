"""Runs one batch from its file to its results, while holding its lease.

All state is in the store: after a crash another process reads which lines have results, and runs the others. A result
is one line, which is appended as soon as it is known; its id ends with the number of its line.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Literal

import msgspec
import orjson

from pagemill_gateway.batches.idle import IdleCapacity
from pagemill_gateway.batches.line_sender import LineReply, LineSender
from pagemill_gateway.batches.lines import BrokenLine, Line, LineChecker, raw_lines
from pagemill_gateway.batches.objects import FINAL, Batch, BatchFile, LineFault
from pagemill_gateway.batches.store import BatchStore, Lease
from pagemill_gateway.config import BatchesConfig

TICK_S = 1.0
"""Interval of checks for expiry and cancellation, and of the lease's renewal."""
MAX_TRIES = 3
"""Attempts of a line after errors of engine or gateway."""
MAX_FAULTS = 20
"""Limit for the faults that are shown of a file without a valid line."""
NUM_EXPIRED_AT_ONCE = 500
EXPIRED = LineFault("batch_expired", "The request was not run before the batch's completion window ended.")


class BatchJob:
    def __init__(
        self,
        batch: Batch,
        store: BatchStore,
        lease: Lease,
        config: BatchesConfig,
        sender: LineSender,
        idle: IdleCapacity,
        places: asyncio.Semaphore,
        max_line_bytes: int,
    ) -> None:
        """`places` limits the lines that this process runs at a time, over all batches."""
        self._batch = batch
        self._store = store
        self._lease = lease
        self._config = config
        self._sender = sender
        self._idle = idle
        self._places = places
        self._max_line_bytes = max_line_bytes
        self._ends_early: Literal["cancelled", "expired"] | None = None
        self._saved = b""

    async def run(self) -> None:
        """Run the batch to its end.

        Raises `LeaseLost`, and `PagemillError` while the store is unavailable; the batch can be run again later.
        """
        batch = self._batch
        if batch.status not in FINAL:
            for file_id in (batch.output_file_id, batch.error_file_id):
                await self._store.trim(file_id)
            await self._run_lines()
            if batch.status != "failed":
                await self._finish()
            await self._save()
        await self._store.remove("open", "", batch.id)
        await self._store.remove("cancels", batch.account, batch.id)

    async def _run_lines(self) -> None:
        work = asyncio.create_task(self._work())
        try:
            await self._look(work)
            while not work.done():
                await asyncio.wait({work}, timeout=TICK_S)
                await self._look(work)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if self._ends_early is None:
            work.result()

    async def _look(self, work: asyncio.Task[None]) -> None:
        batch = self._batch
        await self._lease.renew()
        if self._ends_early is None and await self._store.get("cancels", batch.account, batch.id) is not None:
            self._ends_early = "cancelled"
            batch.became("cancelling")
        elif self._ends_early is None and time.time() >= batch.expires_at:
            self._ends_early = "expired"
        if self._ends_early is not None:
            work.cancel()
        await self._save()

    async def _work(self) -> None:
        batch = self._batch
        if not await self._validate():
            return
        batch.became("in_progress")
        done, _ = await self._results()
        own_places = asyncio.Semaphore(self._config.max_concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                async for line in self._lines():
                    if line.number in done:
                        continue
                    if isinstance(line, BrokenLine):
                        await self._keep(self._fault(line.number, line.custom_id, line.fault), failed=True)
                        continue
                    await own_places.acquire()
                    await self._idle.wait(line.model)
                    group.create_task(self._run_line(line)).add_done_callback(lambda _: own_places.release())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _validate(self) -> bool:
        """Return whether the file has a valid line; otherwise set the batch to failed."""
        batch = self._batch
        faults: list[LineFault] = []
        num_lines = 0
        async for line in self._lines():
            num_lines += 1
            if isinstance(line, BrokenLine):
                faults.append(line.fault)
        if await self._store.get("files", batch.account, batch.input_file_id) is None:
            faults = [LineFault("input_file_not_found", "The input file was deleted.")]
        elif not num_lines:
            faults = [LineFault("empty_file", "The input file has no line.")]
        elif num_lines > self._config.max_lines:
            most = self._config.max_lines
            faults = [LineFault("too_many_lines", f"The file has {num_lines} requests; {most} are allowed. Split it.")]
        elif len(faults) < num_lines:
            batch.num_lines = num_lines
            return True
        batch.faults = faults[:MAX_FAULTS]
        batch.became("failed")
        return False

    async def _lines(self) -> AsyncIterator[Line | BrokenLine]:
        checker = LineChecker(self._batch.endpoint, self._max_line_bytes)
        async for number, raw in raw_lines(self._reader(self._batch.input_file_id), self._max_line_bytes):
            yield checker.check(number, raw)

    async def _run_line(self, line: Line) -> None:
        reply = await self._answer(line)
        fields = {"status_code": reply.status, "request_id": self._line_id(line.number), "body": _body(reply)}
        await self._keep(self._result(line.number, line.custom_id, response=fields), failed=not reply.ok)

    async def _answer(self, line: Line) -> LineReply:
        batch, num_failures = self._batch, 0
        while True:
            # Released between attempts, so that a line that waits for a rate limit takes no place from others.
            async with self._places:
                reply = await self._sender.send(batch.endpoint, line.body, batch.key_hash, self._line_id(line.number))
            pause_s = reply.pause_s
            if not reply.waits:
                num_failures += 1
                if reply.status < 500 or num_failures == MAX_TRIES:
                    return reply
                pause_s = float(2**num_failures)
            await asyncio.sleep(pause_s)
            await self._idle.wait(line.model)

    async def _keep(self, result: dict[str, Any], *, failed: bool) -> None:
        batch = self._batch
        file_id = batch.error_file_id if failed else batch.output_file_id
        await _whole(self._store.append(file_id, orjson.dumps(result) + b"\n", self._lease))
        batch.num_failed += failed
        batch.num_completed += not failed

    async def _finish(self) -> None:
        batch = self._batch
        if self._ends_early != "cancelled":
            batch.became("finalizing")
        if self._ends_early == "expired":
            await self._expire_others()
        _, sizes = await self._results()
        batch.has_output, batch.has_errors = (size > 0 for size in sizes)
        names = ((batch.output_file_id, "output"), (batch.error_file_id, "error"))
        for (file_id, what), size in zip(names, sizes, strict=True):
            if size:
                name, now = f"{batch.id}_{what}.jsonl", int(time.time())
                file = BatchFile(id=file_id, bytes=size, created_at=now, filename=name, purpose="batch_output")
                await self._store.put("files", batch.account, file_id, msgspec.json.encode(file), self._lease)
        batch.became(self._ends_early or "completed")

    async def _expire_others(self) -> None:
        done, _ = await self._results()
        results: list[bytes] = []
        async for line in self._lines():
            if line.number not in done:
                results.append(orjson.dumps(self._fault(line.number, line.custom_id, EXPIRED)) + b"\n")
            if len(results) == NUM_EXPIRED_AT_ONCE:
                await self._store.append(self._batch.error_file_id, b"".join(results), self._lease)
                results = []
        if results:
            await self._store.append(self._batch.error_file_id, b"".join(results), self._lease)

    async def _results(self) -> tuple[set[int], list[int]]:
        """Return the numbers of the lines that have results and the sizes of both files; update the batch's counts."""
        batch, numbers = self._batch, [set[int](), set[int]()]
        sizes = [0, 0]
        for place, file_id in enumerate((batch.output_file_id, batch.error_file_id)):
            async for _, raw in raw_lines(self._reader(file_id), 2**62):
                assert raw is not None  # no line exceeds the limit
                numbers[place].add(int(orjson.loads(raw)["id"].rpartition("_")[2]))
                sizes[place] += len(raw) + 1
        batch.num_completed, batch.num_failed = map(len, numbers)
        return numbers[0] | numbers[1], sizes

    def _reader(self, file_id: str) -> Any:
        return lambda offset, size: self._store.read(file_id, offset, size)

    def _line_id(self, number: int) -> str:
        return f"batch_req_{self._batch.id.removeprefix('batch_')}_{number}"

    def _fault(self, number: int, custom_id: str | None, fault: LineFault) -> dict[str, Any]:
        return self._result(number, custom_id, error={"code": fault.code, "message": fault.message, "line": number})

    def _result(self, number: int, custom_id: str | None, **outcome: Any) -> dict[str, Any]:
        return {"id": self._line_id(number), "custom_id": custom_id, "response": None, "error": None, **outcome}

    async def _save(self) -> None:
        raw = msgspec.json.encode(self._batch)
        if raw != self._saved:
            await self._store.put("batches", self._batch.account, self._batch.id, raw, self._lease)
            self._saved = raw


def _body(reply: LineReply) -> Any:
    try:
        return orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        return None


async def _whole(work: Awaitable[None]) -> None:
    """Wait until the work is complete, even if this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
