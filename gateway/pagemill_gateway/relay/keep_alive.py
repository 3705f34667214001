"""Sends events at intervals to streaming clients whose requests wait: what clients of the dialect ignore.

Most dialects have comments with the expected remaining wait, if it is known: `: waiting, about 34 s`.

One timer serves all waiting requests of the process, and a request that does not wait needs neither timer nor task. The
first event begins the response with status 200; a request that is refused earlier gets its own status.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from pagemill_api.dialects.transport import waiting_comment

logger = logging.getLogger("pagemill.gateway.relay")

TICKS_PER_INTERVAL = 4
EXPECTED_TIMEOUT_S = 1.0
"""The timeout for computing the expected wait."""

Write = Callable[[bytes], Awaitable[None]]
Expected = Callable[[], Awaitable[float | None]]
"""Returns the expected remaining seconds, or `None` if unknown."""
Event = Callable[[float | None], bytes]
"""Returns the event for the expected remaining seconds, or for `None` if they are unknown (`Transport.waiting`)."""
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _WaitingClient:
    write: Write
    expected: Expected
    event: Event
    written_at: float
    writing: asyncio.Task[None] | None = None


async def _unknown() -> float | None:
    return None


class KeepAlive:
    """Sends the events of a process until `close`. Create it inside a running event loop."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._waiting: dict[_WaitingClient, None] = {}
        self._ticking = self._next_tick()

    def close(self) -> None:
        self._ticking.cancel()

    async def during(
        self,
        question: Awaitable[Result],
        write: Write | None,
        expected: Expected = _unknown,
        event: Event | None = waiting_comment,
    ) -> Result:
        """Return the result of `question`; while it takes long, write events, unless an argument is None."""
        if write is None or event is None:
            return await question
        waiting = _WaitingClient(write, expected, event, time.monotonic())
        self._waiting[waiting] = None
        try:
            return await question
        finally:
            del self._waiting[waiting]
            if waiting.writing is not None:
                # An unfinished event waits for a slow reader; the answer is written next.
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
                waiting.writing = asyncio.create_task(_write_event(waiting))


async def _write_event(waiting: _WaitingClient) -> None:
    try:
        await waiting.write(waiting.event(await _left_s(waiting.expected)))
    except Exception:
        # The next write raises the same error and reports it.
        logger.debug("an event could not be written", exc_info=True)


async def _left_s(expected: Expected) -> float | None:
    try:
        async with asyncio.timeout(EXPECTED_TIMEOUT_S):
            return await expected()
    except TimeoutError:
        return None
