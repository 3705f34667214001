"""Finds open batches that no other process runs, and runs them: a few at a time, fairly between accounts."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import msgspec

from pagemill_gateway.batches.idle import IdleCapacity
from pagemill_gateway.batches.job import BatchJob
from pagemill_gateway.batches.line_sender import LineSender
from pagemill_gateway.batches.objects import Batch
from pagemill_gateway.batches.store import BatchStore, Lease, LeaseLost
from pagemill_gateway.config import BatchesConfig
from pagemill_protocol.errors import PagemillError

logger = logging.getLogger("pagemill.gateway.batches")

SCAN_S = 1.0
MAX_RUNNING = 8
"""Limit for the batches that one process runs at the same time."""


class BatchRunner:
    """Runs batches until `close`. Create it inside a running event loop."""

    def __init__(
        self, config: BatchesConfig, store: BatchStore, sender: LineSender, idle: IdleCapacity, max_line_bytes: int
    ) -> None:
        self._config = config
        self._store = store
        self._sender = sender
        self._idle = idle
        self._max_line_bytes = max_line_bytes
        self._places = asyncio.Semaphore(config.max_concurrency)
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """Account and task of each running batch, by batch id."""
        self._woken = asyncio.Event()
        self._scanning = asyncio.create_task(self._scan_for_ever())

    def wake(self) -> None:
        """Look for batches at once, because there is a new one."""
        self._woken.set()

    async def close(self) -> None:
        tasks = [self._scanning, *(task for _, task in self._running.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _scan_for_ever(self) -> None:
        while True:
            try:
                await self._scan()
            except PagemillError as error:
                logger.warning("batches cannot be run now: %s", error)
            except Exception:
                logger.exception("looking for batches failed")
            self._woken.clear()
            try:
                async with asyncio.timeout(SCAN_S):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def _scan(self) -> None:
        found = await self._store.all("open", "")
        waiting = {batch_id: account.decode() for batch_id, account in found.items() if batch_id not in self._running}
        while waiting and len(self._running) < MAX_RUNNING:
            counts = Counter(account for account, _ in self._running.values())
            batch_id = min(waiting, key=lambda each: (counts[waiting[each]], each))
            account = waiting.pop(batch_id)
            lease = await self._store.lease(batch_id)
            if lease is not None:
                task = asyncio.create_task(self._run(batch_id, account, lease), name=batch_id)
                self._running[batch_id] = account, task
                task.add_done_callback(lambda task: self._running.pop(task.get_name(), None))

    async def _run(self, batch_id: str, account: str, lease: Lease) -> None:
        try:
            raw = await self._store.get("batches", account, batch_id)
            if raw is None:
                await self._store.remove("open", "", batch_id)
                return
            batch = msgspec.json.decode(raw, type=Batch)
            job = BatchJob(
                batch,
                self._store,
                lease,
                self._config,
                self._sender,
                self._idle,
                self._places,
                self._max_line_bytes,
            )
            await job.run()
            logger.info("batch %s is %s: %d of %d lines", batch_id, batch.status, batch.num_completed, batch.num_lines)
        except LeaseLost:
            logger.warning("batch %s: another gateway holds the lease now", batch_id)
        except PagemillError as error:
            logger.warning("batch %s is left for later: %s", batch_id, error)
        except Exception:
            logger.exception("batch %s failed; it is tried again", batch_id)
            await asyncio.sleep(SCAN_S)
        finally:
            try:
                await lease.release()
            except PagemillError:
                logger.info("the lease of batch %s runs out by itself", batch_id)
