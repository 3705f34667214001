"""A timeout for each of many short waits, with one timer for all of them, where `asyncio.timeout` needs one for each.

Streams wait twice for every chunk, usually briefly; setting and cancelling a timer costs more than forwarding the
chunk. This timer is set once. When it is due, it checks the duration of the current wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

Result = TypeVar("Result")


class RepeatedTimeout:
    """The timeout. Create it inside a running event loop, and `close` it after the last wait."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        """The waiting task."""
        self._due_at = 0.0
        self._is_over = False

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def wait(self, awaitable: Awaitable[Result]) -> Result:
        """Wait for the awaitable. Cancels it and raises `TimeoutError` if it takes longer than the limit."""
        task = asyncio.current_task()
        if self._task is not None or task is None:  # one at a time; a second waiting task has a timer of its own
            async with asyncio.timeout(self._limit_s):
                return await awaitable
        num_cancels = task.cancelling()
        self._task, self._due_at = task, self._loop.time() + self._limit_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._due_at, self._look)
        try:
            return await awaitable
        except BaseException as error:
            # As in `asyncio.timeout`, a cancellation by another task is propagated.
            if self._is_over and task.uncancel() <= num_cancels and isinstance(error, asyncio.CancelledError):
                raise TimeoutError from error
            raise
        finally:
            self._task, self._is_over = None, False

    def _look(self) -> None:
        self._timer = None
        if self._task is None:
            return  # the next wait sets the timer again
        if self._loop.time() < self._due_at:
            self._timer = self._loop.call_at(self._due_at, self._look)
            return
        self._is_over = True
        self._task.cancel()
