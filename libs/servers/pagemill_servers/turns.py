"""Spreads the beginning of requests over turns of the event loop, so that thousands at once delay no running stream.

`connection` begins each request through it. It neither limits nor refuses: requests begin in order of arrival, and at
once while few arrive.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MAX_BEGUN = 64
"""Requests that begin in one turn: some milliseconds to some tens of milliseconds of work."""


class Turns:
    def __init__(self, max_begun: int = MAX_BEGUN) -> None:
        self._max_begun = max_begun
        self._num_begun = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def begin(self, request: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        """Call `request` now, or in a later turn if many have begun in this one."""
        if self._waiting or self._num_begun >= self._max_begun:
            self._waiting.append(request)
            return
        self._num_begun += 1
        request()
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._next_turn, loop)

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        num_begun = min(self._max_begun, len(self._waiting))
        self._num_begun = num_begun
        self._is_scheduled = bool(num_begun)
        if num_begun:
            loop.call_soon(self._next_turn, loop)
        for _ in range(num_begun):
            self._waiting.popleft()()
