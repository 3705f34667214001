"""Bounds what the running lines of one process hold in memory and what one tenant's results take on disk."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

SHARE_OF_BODIES = 4
"""Lines get this part of the bytes that all requests inside the gateway may have; the rest is for live requests."""
LEAST_LINE_BYTES = 256 * 1024
"""What a line of any size is assumed to hold: buffers of its answer on the way to the disk."""
TIMES_TEXT = 4
"""How many times a line's text is assumed to be held: as it was read, as its request, and parsed."""


class LineMemory:
    """A number of bytes that running lines share. Lines wait for their part in order."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.num_bytes = 0
        self.most_bytes = 0
        """The most bytes that were ever held."""

    @asynccontextmanager
    async def hold(self, line_bytes: int) -> AsyncIterator[None]:
        """Hold the memory of a line for the body of the `with`. A line that needs more than all runs alone."""
        need = min(self._max_bytes, LEAST_LINE_BYTES + TIMES_TEXT * line_bytes)
        await self._take(need)
        try:
            yield
        finally:
            self._give(need)

    async def _take(self, need: int) -> None:
        if not self._waiting and self.num_bytes + need <= self._max_bytes:
            self._count(need)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((need, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came in the same moment
                self._give(need)
            else:
                with suppress(ValueError):  # it may have been skipped already
                    self._waiting.remove((need, turn))
                self._wake()
            raise

    def _give(self, need: int) -> None:
        self.num_bytes -= need
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self.num_bytes + self._waiting[0][0] <= self._max_bytes:
            need, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._count(need)
                turn.set_result(None)

    def _count(self, need: int) -> None:
        self.num_bytes += need
        self.most_bytes = max(self.most_bytes, self.num_bytes)


class ResultSpace:
    """The bytes that the results of one tenant's running batches may still take."""

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left

    def take(self, num_bytes: int) -> bool:
        """Take bytes. Return whether there were enough; otherwise nothing is taken."""
        if num_bytes > self.num_left:
            return False
        self.num_left -= num_bytes
        return True
