"""Records which lines of a batch are running, so that a line that ends its gateway is found and not run for ever.

A line is in the record before its request begins. A process that continues the batch of one that died finds there the
lines that were running: each of them may be the cause. They run again one at a time (`job`), and a line that was
running in `MAX_DEATHS` deaths is not run any more.
"""

from __future__ import annotations

import asyncio

import msgspec

from pagemill_gateway.batches.objects import Batch, LineFault
from pagemill_gateway.batches.store import BatchStore, Lease

MAX_DEATHS = 2
GATEWAY_DIED = LineFault(
    "gateway_died",
    f"The gateway's process died {MAX_DEATHS} times while this line was running, so it is not run again. Send a "
    "smaller request: fewer choices, log probabilities or tokens.",
)


class _Record(msgspec.Struct):
    running: list[int] = []
    num_deaths: dict[int, int] = {}
    """The deaths in which each line was running, of lines with at least one."""


class RunningLines:
    def __init__(self, batch: Batch, store: BatchStore, lease: Lease) -> None:
        self._batch = batch
        self._store = store
        self._lease = lease
        self._running: set[int] = set()
        self._num_deaths: dict[int, int] = {}
        self._saving = asyncio.Lock()
        self._version = self._saved = 0

    @property
    def probed(self) -> frozenset[int]:
        """The lines that were running in a death and may run once more, one at a time."""
        return frozenset(number for number, deaths in self._num_deaths.items() if deaths < MAX_DEATHS)

    @property
    def fatal(self) -> frozenset[int]:
        """The lines that must not run again."""
        return frozenset(self._num_deaths) - self.probed

    async def load(self) -> None:
        """Count a death of the process before, if lines were running in it."""
        raw = await self._store.get("running", self._batch.account, self._batch.id)
        if raw is None:
            return
        record = msgspec.json.decode(raw, type=_Record)
        self._num_deaths = record.num_deaths
        for number in record.running:
            self._num_deaths[number] = self._num_deaths.get(number, 0) + 1
        if record.running:
            self._version += 1
            await self.save()

    async def begin(self, number: int) -> None:
        """Return when the line is recorded as running. Lines that begin together share one write."""
        self._running.add(number)
        self._version += 1
        await self.save()

    def end(self, number: int) -> None:
        """Count the line as running no longer, with the next `save`."""
        self._running.discard(number)
        self._version += 1

    async def save(self) -> None:
        """Return when all changes so far are in the store."""
        version = self._version
        async with self._saving:
            if self._saved >= version:
                return
            version = self._version
            raw = msgspec.json.encode(_Record(sorted(self._running), self._num_deaths))
            await self._store.put("running", self._batch.account, self._batch.id, raw, self._lease)
            self._saved = version

    async def remove(self) -> None:
        await self._store.remove("running", self._batch.account, self._batch.id)
