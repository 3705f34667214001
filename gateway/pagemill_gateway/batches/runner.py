"""Finds open batches that no other process runs, and runs them: a few at a time, fairly between accounts.

Batches that only have to be ended, because they are cancelled or expired, wait for no others. A cancellation is looked
for often (`CANCEL_POLL_S`), because the running lines of the batch cost capacity until it is seen.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import NamedTuple

import msgspec

from pagemill_gateway.batches.job import BatchJob
from pagemill_gateway.batches.objects import Batch, created_at_ns
from pagemill_gateway.batches.resources import BatchResources
from pagemill_gateway.batches.store import Lease, LeaseLost
from pagemill_protocol.errors import PagemillError

logger = logging.getLogger("pagemill.gateway.batches")

SCAN_S = 1.0
CANCEL_POLL_S = 0.05
MAX_RUNNING = 8
"""Limit for the batches that one process runs at the same time."""
MAX_ENDING = 4
"""Limit for further batches that are only ended."""
MAX_PAUSE_S = 15.0
"""The longest pause before a batch that failed is tried again; the pauses double from `SCAN_S`."""
CREATION_S = 60.0
"""The age of an open batch without a record, after which its creation is not under way any more."""


class _Running(NamedTuple):
    account: str
    task: asyncio.Task[None]
    only_ends: bool


class BatchRunner:
    """Runs batches until `close`. Create it inside a running event loop."""

    def __init__(self, resources: BatchResources) -> None:
        self.resources = resources
        self._store = resources.store
        self._running: dict[str, _Running] = {}
        self._jobs: dict[str, BatchJob] = {}
        self._expires_at: dict[str, int] = {}
        """The end of each waiting batch."""
        self._pauses: dict[str, tuple[float, float]] = {}
        """Of each batch that failed: the end of its pause, and the pause's length."""
        self._woken = asyncio.Event()
        self._tasks = [asyncio.create_task(self._scan_for_ever()), asyncio.create_task(self._end_cancelled())]

    def wake(self) -> None:
        """Look for batches at once, because there is a new one."""
        self._woken.set()

    def cancelled(self, batch_id: str) -> None:
        """Abort the running lines of a batch, if it runs here, because its cancellation is in the store."""
        if job := self._jobs.get(batch_id):
            job.end_early("cancelled")
        self.wake()

    async def close(self) -> None:
        tasks = [*self._tasks, *(each.task for each in self._running.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_cancelled(self) -> None:
        """Abort batches that run here and are cancelled at another process."""
        while True:
            await asyncio.sleep(CANCEL_POLL_S)
            if not self._jobs:
                continue
            try:
                cancelled = await self._store.all("cancels", "")
            except PagemillError:
                continue  # the scan reports it
            for batch_id in self._jobs.keys() & cancelled.keys():
                self._jobs[batch_id].end_early("cancelled")

    async def _scan_for_ever(self) -> None:
        while True:
            self._woken.clear()
            try:
                await self._scan()
            except PagemillError as error:
                logger.warning("batches cannot be run now: %s", error)
            except Exception:
                logger.exception("looking for batches failed")
            try:
                async with asyncio.timeout(SCAN_S):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def _scan(self) -> None:
        found = {batch_id: account.decode() for batch_id, account in (await self._store.all("open", "")).items()}
        self._forget_all_but(found)
        now = time.monotonic()
        waiting = {
            batch_id: account
            for batch_id, account in found.items()
            if batch_id not in self._running and self._pauses.get(batch_id, (0.0, 0.0))[0] <= now
        }
        while waiting and self._num_running(only_ends=False) < MAX_RUNNING:
            counts = Counter(each.account for each in self._running.values())
            batch_id = min(waiting, key=lambda each: (counts[waiting[each]], each))
            await self._start(batch_id, waiting.pop(batch_id), only_ends=False)
        if waiting:
            await self._start_ending(waiting)

    async def _start_ending(self, waiting: dict[str, str]) -> None:
        """Start those of the batches that only have to be ended."""
        cancelled, now = await self._store.all("cancels", ""), time.time()
        for batch_id, account in waiting.items():
            if self._num_running(only_ends=True) >= MAX_ENDING:
                return
            if batch_id not in self._expires_at:
                raw = await self._store.get("batches", account, batch_id)
                self._expires_at[batch_id] = msgspec.json.decode(raw, type=Batch).expires_at if raw is not None else 0
            if batch_id in cancelled or self._expires_at[batch_id] <= now:
                await self._start(batch_id, account, only_ends=True)

    def _num_running(self, *, only_ends: bool) -> int:
        return sum(each.only_ends is only_ends for each in self._running.values())

    def _forget_all_but(self, found: dict[str, str]) -> None:
        for batch_id in [each for each in self._expires_at if each not in found]:
            del self._expires_at[batch_id]
        for batch_id in [each for each in self._pauses if each not in found]:
            del self._pauses[batch_id]

    async def _start(self, batch_id: str, account: str, *, only_ends: bool) -> None:
        lease = await self._store.lease(batch_id)
        if lease is not None:
            task = asyncio.create_task(self._run(batch_id, account, lease), name=batch_id)
            self._running[batch_id] = _Running(account, task, only_ends)
            task.add_done_callback(lambda task: self._running.pop(task.get_name(), None))

    async def _run(self, batch_id: str, account: str, lease: Lease) -> None:
        try:
            await self._run_leased(batch_id, account, lease)
            self._pauses.pop(batch_id, None)
        except LeaseLost:
            logger.warning("batch %s: another gateway holds the lease now", batch_id)
        except PagemillError as error:
            logger.warning("batch %s is left for later: %s", batch_id, error)
            self._pause(batch_id)
        except Exception:
            logger.exception("batch %s failed; it is tried again", batch_id)
            self._pause(batch_id)
        finally:
            self._jobs.pop(batch_id, None)
            try:
                await lease.release()
            except PagemillError:
                logger.info("the lease of batch %s runs out by itself", batch_id)

    async def _run_leased(self, batch_id: str, account: str, lease: Lease) -> None:
        raw = await self._store.get("batches", account, batch_id)
        if raw is None:
            # `Batches.create` writes the record last.
            if time.time_ns() - created_at_ns(batch_id) > CREATION_S * 1e9:
                await self._store.remove("open", "", batch_id)
            return
        batch = msgspec.json.decode(raw, type=Batch)
        async with self.resources.space_of(account) as space:
            self._jobs[batch_id] = job = BatchJob(batch, lease, self.resources, space)
            await job.run()
        logger.info("batch %s is %s: %d of %d lines", batch_id, batch.status, batch.num_completed, batch.num_lines)

    def _pause(self, batch_id: str) -> None:
        pause_s = min(MAX_PAUSE_S, 2 * self._pauses.get(batch_id, (0.0, SCAN_S / 2))[1])
        self._pauses[batch_id] = time.monotonic() + pause_s, pause_s
