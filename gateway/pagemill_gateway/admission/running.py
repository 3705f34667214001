"""Requests under way: each with its deadline, all of them endable when the drain has lasted long enough."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pagemill_protocol.errors import PagemillError, deadline_exceeded, unavailable


class Running:
    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self._ending = False

    @asynccontextmanager
    async def limited(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Run the block for at most `timeout_s`, or until `end_all`. Raises `PagemillError` when it was cut short."""
        try:
            async with asyncio.timeout(0 if self._ending else timeout_s) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if limit.expired():
                raise self._cause() from None
            raise

    def end_all(self) -> None:
        """Cut every block short, now and in future."""
        self._ending = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            # One whose time is up already is on its way out and cannot be moved any more.
            if not limit.expired():
                limit.reschedule(now)

    def _cause(self) -> PagemillError:
        if self._ending:
            return unavailable("The gateway is shutting down and cut the answer short.", 1, code="draining")
        return deadline_exceeded()
