"""Counts stop signals: the first one begins the drain, a second one skips its waits."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    def __init__(self) -> None:
        self._count = 0
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def wait(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._count >= count)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for each in SIGNALS:
            loop.add_signal_handler(each, self._signalled)
        try:
            yield
        finally:
            for each in SIGNALS:
                loop.remove_signal_handler(each)

    def _signalled(self) -> None:
        task = asyncio.ensure_future(self._count_one())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _count_one(self) -> None:
        async with self._changed:
            self._count += 1
            self._changed.notify_all()
