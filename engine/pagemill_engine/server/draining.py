"""The way out of service: announce it, wait until no gateway sends any more, only then refuse.

Between the announcement and the last acknowledgement requests are still taken: a request that a gateway sent before it
knew is served, not refused. Readiness is gone from the first moment. Which gateways there are is known from the state
streams that are open. Running requests are none of its business: `main` waits for them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import NamedTuple

from pagemill_engine.server.lifecycle import Lifecycle
from pagemill_engine.server.state_stream import StatePublisher

ACKNOWLEDGE_TIMEOUT_S = 5.0
"""Longest wait after SIGTERM if no drain was requested before. Gateways acknowledge within milliseconds."""


class Gateways(NamedTuple):
    """Readers of the state stream now, and how many of them have acknowledged."""

    connected: int
    acknowledged: int


class Draining:
    def __init__(self, lifecycle: Lifecycle, publisher: StatePublisher) -> None:
        self._lifecycle = lifecycle
        self._publisher = publisher
        self._readers: Counter[str] = Counter()
        """Open streams by reader."""
        self._acknowledged: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def gateways(self) -> Gateways:
        return Gateways(len(self._readers), len(self._acknowledged & self._readers.keys()))

    def announce(self, num_requests: int) -> None:
        """Unready from now on. There is no way back."""
        self._lifecycle.enter("draining", f"{num_requests} requests are still running")
        self._publisher.set_draining()

    async def settle(self, timeout_s: float) -> None:
        """Return when every reader has acknowledged, or left, or after `timeout_s`; requests are refused then."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._readers.keys() - self._acknowledged:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        self._lifecycle.close_door()

    def reader_came(self, gateway: str) -> None:
        self._readers[gateway] += 1

    def reader_left(self, gateway: str) -> None:
        self._readers[gateway] -= 1
        if self._readers[gateway] <= 0:
            del self._readers[gateway]
        self._changed.set()

    def acknowledge(self, gateway: str) -> None:
        """The gateway sends nothing more. Said before there is a drain, it means nothing."""
        if self._lifecycle.ending:
            self._acknowledged.add(gateway)
            self._changed.set()
