"""After the brain's process was replaced: what workers hold of keys' limits is counted before anybody gets more.

The first worker that is back could else take places that another one still holds. A worker that does not come back, or
not soon, delays no request for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

PATIENCE_S = 1.0
"""Workers look for the new process twenty times a second."""


class Recount:
    """Create inside a running event loop."""

    def __init__(self, num_workers: int) -> None:
        """`num_workers` that have to report; 0: nothing was reserved before."""
        self._num_workers = num_workers
        self._reporting: set[Hashable] = set()
        self._over = asyncio.Event()
        if num_workers == 0:
            self._over.set()

    def reported_by(self, worker: Hashable) -> None:
        """Its reservations are in the store again."""
        self._reporting.add(worker)
        if len(self._reporting) >= self._num_workers:
            self._over.set()

    async def done(self) -> None:
        """Wait for all workers, but from the first question on no longer than patience lasts."""
        if self._over.is_set():
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._over.wait()
        except TimeoutError:
            self._over.set()
