"""Draining: announces it, waits until no gateway sends requests any more, then refuses them.

Between the announcement and the last acknowledgement requests are still accepted: a request that a gateway sent before
it learned of the drain is served. The server is unready from the announcement on. The open state streams show which
gateways exist. Waiting for running requests is `main`'s part.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import NamedTuple

from pagemill_engine.server.phases.lifecycle import Lifecycle
from pagemill_engine.server.phases.state_stream import StatePublisher

ACKNOWLEDGE_TIMEOUT_S = 5.0
"""Longest wait after SIGTERM if no drain was requested before. Gateways acknowledge within milliseconds."""


class Gateways(NamedTuple):
    """Number of gateways that read the state stream, and how many of them have acknowledged the drain."""

    connected: int
    acknowledged: int


class Draining:
    def __init__(self, lifecycle: Lifecycle, publisher: StatePublisher) -> None:
        self._lifecycle = lifecycle
        self._publisher = publisher
        self._readers: Counter[str] = Counter()
        """Number of open state streams by reader."""
        self._acknowledged: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def gateways(self) -> Gateways:
        return Gateways(len(self._readers), len(self._acknowledged & self._readers.keys()))

    def announce(self, num_requests: int) -> None:
        """Make the server unready for good and publish that it drains."""
        self._lifecycle.enter("draining", f"{num_requests} requests are still running")
        self._publisher.set_draining()

    async def settle(self, timeout_s: float) -> None:
        """Wait until every reader has acknowledged or left, at most `timeout_s`; then refuse requests."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._readers.keys() - self._acknowledged:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        self._lifecycle.refuse_requests()

    def reader_connected(self, gateway: str) -> None:
        self._readers[gateway] += 1

    def reader_disconnected(self, gateway: str) -> None:
        self._readers[gateway] -= 1
        if self._readers[gateway] <= 0:
            del self._readers[gateway]
        self._changed.set()

    def acknowledge(self, gateway: str) -> None:
        """Record that the gateway sends no more requests. Before a drain this has no effect."""
        if self._lifecycle.ending:
            self._acknowledged.add(gateway)
            self._changed.set()
