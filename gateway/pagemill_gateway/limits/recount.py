"""Waits, after the control process was replaced, until workers have reported the limits that they have reserved.

Otherwise the first worker could reserve places that another one still uses. A worker that does not return delays
requests by `PATIENCE_S` at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

PATIENCE_S = 1.0
"""Workers try to connect to the new process twenty times a second."""


class Recount:
    """The wait for all workers' reports. Create it inside a running event loop."""

    def __init__(self, num_workers: int) -> None:
        """`num_workers` must report; 0 if nothing was reserved before."""
        self._num_workers = num_workers
        self._reporting: set[Hashable] = set()
        self._over = asyncio.Event()
        if num_workers == 0:
            self._over.set()

    def reported_by(self, worker: Hashable) -> None:
        """Note that the worker's reservations are in the store again."""
        self._reporting.add(worker)
        if len(self._reporting) >= self._num_workers:
            self._over.set()

    async def done(self) -> None:
        """Wait for all workers, but at most `PATIENCE_S` from the first call on."""
        if self._over.is_set():
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._over.wait()
        except TimeoutError:
            self._over.set()
