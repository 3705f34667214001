"""SSE comments for streaming clients whose request waits, at intervals; clients skip them.

A comment gives the expected remaining wait, where it is known: `: waiting, about 34 s`.

One tick serves the whole process, however many requests wait; a request that does not have to wait costs it no timer
and no task. The first comment begins the response with status 200; a request that is refused before it still gets a
status of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

logger = logging.getLogger("pagemill.gateway.relay")

TICKS_PER_INTERVAL = 4
EXPECTED_TIMEOUT_S = 1.0
"""The expected wait must be known within this time."""

Write = Callable[[bytes], Awaitable[None]]
Expected = Callable[[], Awaitable[float | None]]
"""Remaining seconds; `None`: unknown."""
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _WaitingClient:
    write: Write
    expected: Expected
    written_at: float
    writing: asyncio.Task[None] | None = None


async def _unknown() -> float | None:
    return None


class KeepAlive:
    """Create inside a running event loop; `close` ends it."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._waiting: dict[_WaitingClient, None] = {}
        self._ticking = self._next_tick()

    def close(self) -> None:
        self._ticking.cancel()

    async def during(self, question: Awaitable[Result], write: Write | None, expected: Expected = _unknown) -> Result:
        """The result of `question`; while it takes long, comments are written with `write`."""
        if write is None:
            return await question
        waiting = _WaitingClient(write, expected, time.monotonic())
        self._waiting[waiting] = None
        try:
            return await question
        finally:
            del self._waiting[waiting]
            if waiting.writing is not None:
                # A comment that is not out yet waits for a slow reader; from now on the answer is written.
                waiting.writing.cancel()

    def _next_tick(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._interval_s / TICKS_PER_INTERVAL, self._tick)

    def _tick(self) -> None:
        self._ticking = self._next_tick()
        now = time.monotonic()
        for waiting in self._waiting:
            is_written = waiting.writing is None or waiting.writing.done()
            if is_written and now - waiting.written_at >= self._interval_s:
                waiting.written_at = now
                waiting.writing = asyncio.create_task(_write_comment(waiting.write, waiting.expected))


async def _write_comment(write: Write, expected: Expected) -> None:
    try:
        await write(await _comment(expected))
    except Exception:
        # The next write meets the same error, and can report it.
        logger.debug("a comment could not be written", exc_info=True)


async def _comment(expected: Expected) -> bytes:
    try:
        async with asyncio.timeout(EXPECTED_TIMEOUT_S):
            left_s = await expected()
    except TimeoutError:
        left_s = None
    return b": waiting\n\n" if left_s is None else b": waiting, about %d s\n\n" % max(1, round(left_s))
