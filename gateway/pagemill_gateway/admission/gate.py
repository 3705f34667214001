"""The gateway's own bound: at most `max_requests` inside at once, decided atomically.

It protects the gateway's memory, not the engines: an engine accepts or refuses by itself, from its headers. There is no
queue here; a request that does not fit is told when to come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pagemill_protocol.errors import unavailable


class Gate:
    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._closed_reason: str | None = None

    @property
    def num_inside(self) -> int:
        return self._num_inside

    def close(self, reason: str) -> None:
        """Refuse every further request with 503 and `reason`; those inside stay."""
        self._closed_reason = reason

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Hold one place for the body of the `with`; raises `PagemillError` (503) at once when there is none."""
        if self._closed_reason is not None:
            raise unavailable(self._closed_reason, retry_after_s=1, code="draining")
        if self._num_inside >= self._max_requests:
            raise unavailable(
                f"The gateway already serves {self._num_inside} requests, its limit. Try again shortly.",
                retry_after_s=1,
            )
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._empty.set()

    async def wait_empty(self) -> None:
        """Return when nobody is inside."""
        await self._empty.wait()
