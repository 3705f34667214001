"""What all batches of one process share: the settings, the store, the way to the engines, and the bounds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from pagemill_gateway.batches.idle import IdleCapacity
from pagemill_gateway.batches.line_memory import SHARE_OF_BODIES, LineMemory, ResultSpace
from pagemill_gateway.batches.line_sender import LineSender
from pagemill_gateway.batches.objects import BatchFile
from pagemill_gateway.batches.store import BatchStore
from pagemill_gateway.config import BatchesConfig


class BatchResources:
    def __init__(
        self,
        config: BatchesConfig,
        store: BatchStore,
        sender: LineSender,
        idle: IdleCapacity,
        *,
        max_line_bytes: int,
        max_in_flight_bytes: int,
    ) -> None:
        """`max_in_flight_bytes` is what all requests inside this process may hold; lines get a part of it."""
        self.config = config
        self.store = store
        self.sender = sender
        self.idle = idle
        self.max_line_bytes = max_line_bytes
        self.places = asyncio.Semaphore(config.max_concurrency)
        """Limits the lines that run at a time, over all batches."""
        self.memory = LineMemory(max_in_flight_bytes // SHARE_OF_BODIES)
        self.alone = asyncio.Lock()
        """Held by a line that was running when a process died."""
        self._spaces: dict[str, ResultSpace] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def space_of(self, account: str) -> AsyncIterator[ResultSpace]:
        """Provide the space for the results of the account's batches, which run in this process at the same time."""
        self._users[account] += 1
        try:
            if account not in self._spaces:
                files = (await self.store.all("files", account)).values()
                used = sum(msgspec.json.decode(raw, type=BatchFile).bytes for raw in files)
                self._spaces.setdefault(account, ResultSpace(self.config.max_tenant_bytes - used))
            yield self._spaces[account]
        finally:
            self._users[account] -= 1
            if not self._users[account]:
                del self._users[account]
                self._spaces.pop(account, None)
