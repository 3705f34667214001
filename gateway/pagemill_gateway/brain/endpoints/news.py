"""Wakes those who wait for a change in what the brain knows. What changed they must look up themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class News:
    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def publish(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether `condition` came to hold within the time; looked at now and after every change."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._next()
        except TimeoutError:
            return condition()
        return True

    async def _next(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)
