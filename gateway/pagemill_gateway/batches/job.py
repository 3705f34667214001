"""Runs one batch from its file to its results, while holding its lease.

All state is in the store: after a crash another process reads which lines have results (`results`) and which were
running (`running_lines`), and runs the others. However a batch ends, each of its lines has a result or an error.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Literal

import msgspec

from pagemill_gateway.batches.answer_file import AnswerFile
from pagemill_gateway.batches.input_file import InputChanged, InputFile
from pagemill_gateway.batches.line_memory import ResultSpace
from pagemill_gateway.batches.line_sender import LineReply
from pagemill_gateway.batches.lines import BrokenLine, Line
from pagemill_gateway.batches.objects import FINAL, Batch, LineFault
from pagemill_gateway.batches.resources import BatchResources
from pagemill_gateway.batches.results import NUM_FAULTS_AT_ONCE, TOO_MANY_BYTES, ResultFiles
from pagemill_gateway.batches.running_lines import GATEWAY_DIED, RunningLines
from pagemill_gateway.batches.store import Lease

TICK_S = 1.0
"""Interval of checks for expiry, of the lease's renewal, and of the visible counts."""
MAX_TRIES = 3
"""Attempts of a line after errors of engine or gateway."""
MAX_FAULTS = 20
"""Limit for the faults that are shown of a file without a valid line."""
LEAST_SPACE_BYTES = 4096
"""With less space for results, no line is run any more."""
EXPIRED = LineFault("batch_expired", "The request was not run before the batch's completion window ended.")
CANCELLED = LineFault("batch_cancelled", "The request was not completed before the batch was cancelled.")
Ending = Literal["cancelled", "expired"]


class BatchJob:
    def __init__(self, batch: Batch, lease: Lease, resources: BatchResources, space: ResultSpace) -> None:
        """`space` is for the results of the batch's account."""
        self._batch = batch
        self._lease = lease
        self._resources = resources
        self._store = resources.store
        self._space = space
        self._input = InputFile(batch, resources.store, resources.max_line_bytes)
        self._results = ResultFiles(batch, resources.store, lease, space)
        self._running = RunningLines(batch, resources.store, lease)
        self._ends_early: Ending | None = None
        self._work: asyncio.Task[None] | None = None
        self._saved = b""

    async def run(self) -> None:
        """Run the batch to its end.

        Raises `LeaseLost`, and `PagemillError` while the store is unavailable; the batch can be run again later.
        """
        batch = self._batch
        if batch.status not in FINAL:
            await self._results.load()
            await self._running.load()
            try:
                await self._run_lines()
                if batch.status != "failed":
                    await self._finish()
            except InputChanged as changed:
                await self._fail(changed.fault)
            await self._save()
        await self._running.remove()
        await self._store.remove("open", "", batch.id)
        await self._store.remove("cancels", batch.account, batch.id)
        await self._store.remove("cancels", "", batch.id)

    def end_early(self, ending: Ending) -> None:
        """Abort the running lines at once, and let `run` end the batch."""
        if self._ends_early is None:
            self._ends_early = ending
            if self._work is not None:
                self._work.cancel()

    async def _run_lines(self) -> None:
        await self._look()
        if self._ends_early is not None:
            return
        self._work = work = asyncio.create_task(self._run_all())
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=TICK_S)
                await self._look()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            # No line runs any more. If this cannot be saved, the next process will probe them.
            await self._running.save()
        if not work.cancelled():
            work.result()

    async def _look(self) -> None:
        batch = self._batch
        await self._lease.renew()
        if await self._store.get("cancels", batch.account, batch.id) is not None:
            self.end_early("cancelled")
        elif time.time() >= batch.expires_at:
            self.end_early("expired")
        if self._ends_early == "cancelled" and batch.status != "failed":
            batch.became("cancelling")
        await self._running.save()
        await self._save()

    async def _run_all(self) -> None:
        if not await self._validate():
            return
        self._batch.became("in_progress")
        try:
            async with asyncio.TaskGroup() as group:
                if self._running.probed:
                    await self._run_probed()
                await self._run_others(group)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run_probed(self) -> None:
        """Run the lines that were running when a process died one at a time, so that the next death has one cause."""
        async for line in self._input.lines():
            if isinstance(line, Line) and line.number in self._running.probed and not self._is_done(line):
                await self._resources.idle.wait(line.model)
                await self._run_line(line, self._resources.alone)

    async def _run_others(self, group: asyncio.TaskGroup) -> None:
        own_places = asyncio.Semaphore(self._resources.config.max_concurrency)
        async for line in self._input.lines():
            if self._is_done(line):
                continue
            if isinstance(line, BrokenLine):
                await self._results.add_faults([line])
                continue
            if line.number in self._running.fatal:
                await self._results.add_faults([BrokenLine(line.number, line.custom_id, GATEWAY_DIED)])
                continue
            await own_places.acquire()
            await self._resources.idle.wait(line.model)
            group.create_task(self._run_line(line)).add_done_callback(lambda _: own_places.release())

    def _is_done(self, line: Line | BrokenLine) -> bool:
        return line.number in self._results.done

    async def _validate(self) -> bool:
        """Return whether the file has a valid line; otherwise set the batch to failed."""
        batch, most = self._batch, self._resources.config.max_lines
        faults: list[LineFault] = []
        num_lines = num_broken = 0
        async for line in self._input.lines():
            num_lines += 1
            if isinstance(line, BrokenLine):
                num_broken += 1
                if len(faults) < MAX_FAULTS:
                    faults.append(line.fault)
            if num_lines > most:
                faults = [LineFault("too_many_lines", f"The file has more than {most} requests. Split it.")]
                break
        else:
            batch.num_lines = num_lines
            if num_broken < num_lines:
                return True
        if not num_lines:
            faults = [LineFault("empty_file", "The input file has no line.")]
        batch.faults = faults
        batch.became("failed")
        return False

    async def _run_line(self, line: Line, alone: AbstractAsyncContextManager[None] | None = None) -> None:
        """Run the line until it has a result; `alone` is held while it runs."""
        resources, num_failures = self._resources, 0
        while True:
            if self._space.num_left < LEAST_SPACE_BYTES:
                await self._results.add_faults([BrokenLine(line.number, line.custom_id, TOO_MANY_BYTES)])
                return
            # Released between attempts, so that a line that waits for a rate limit takes no place from others, and
            # no memory: its text is read again.
            async with alone or nullcontext(), resources.places, resources.memory.hold(line.num_bytes):
                reply, num_failures = await self._try(line, num_failures)
            if reply is None:
                return
            await asyncio.sleep(reply.pause_s if reply.waits else float(2**num_failures))
            await resources.idle.wait(line.model)

    async def _try(self, line: Line, num_failures: int) -> tuple[LineReply | None, int]:
        """Send the line. Return the reply if it is to be sent again, and the number of its failures."""
        resources, batch = self._resources, self._batch
        try:
            await self._running.begin(line.number)
            with AnswerFile(self._store.scratch_directory, self._results.max_answer_bytes) as answer:
                reply = await resources.sender.send(
                    batch.endpoint,
                    await self._input.request(line),
                    batch.key_hash,
                    self._results.line_id(line.number),
                    answer,
                )
                if not answer.is_too_large:
                    num_failures += not reply.waits
                    if reply.waits or (reply.status >= 500 and num_failures < MAX_TRIES):
                        return reply, num_failures
                await self._results.add_answer(line.number, line.custom_id, reply, answer)
        finally:
            self._running.end(line.number)
        return None, num_failures

    async def _finish(self) -> None:
        batch = self._batch
        if self._ends_early != "cancelled":
            batch.became("finalizing")
        ending = self._ends_early
        if not await self._add_missing(CANCELLED if ending == "cancelled" else EXPIRED) and ending == "expired":
            ending = None  # the last line was completed in time
        await self._results.register()
        batch.became(ending or "completed")

    async def _add_missing(self, fault: LineFault) -> int:
        """Give an error to each line without a result. Return the number of these lines."""
        num_lines = num_missing = 0
        missing: list[BrokenLine] = []
        async for line in self._input.lines():
            num_lines += 1
            if num_lines > self._resources.config.max_lines:
                break
            if not self._is_done(line):
                num_missing += 1
                missing.append(BrokenLine(line.number, line.custom_id, fault))
            if len(missing) == NUM_FAULTS_AT_ONCE:
                await self._results.add_faults(missing)
                missing = []
        await self._results.add_faults(missing)
        self._batch.num_lines = num_lines
        return num_missing

    async def _fail(self, fault: LineFault) -> None:
        """End the batch with the results that it has, because the other lines cannot be read any more."""
        batch = self._batch
        num_missing = max(0, batch.num_lines - len(self._results.done))
        shown = f" {num_missing} of {batch.num_lines} lines have no result." if batch.num_lines else ""
        batch.faults = [msgspec.structs.replace(fault, message=fault.message + shown)]
        batch.num_failed += num_missing
        await self._results.register()
        batch.became("failed")

    async def _save(self) -> None:
        raw = msgspec.json.encode(self._batch)
        if raw != self._saved:
            await self._store.put("batches", self._batch.account, self._batch.id, raw, self._lease)
            self._saved = raw
