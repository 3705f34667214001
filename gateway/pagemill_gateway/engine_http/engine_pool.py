"""The pool of connections to engines: chooses the connection of a request and closes idle ones.

A connection returns to the pool only when its response was read completely and nothing else arrived. The pool never
sends a request twice, because an engine may have begun to work on it; `relay` decides about retries.
`engine_connection` is one connection.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

from pagemill_gateway.engine_http.connecting import Connector, Origin
from pagemill_gateway.engine_http.engine_connection import EngineConnection

MAX_IDLE_PER_ORIGIN = 256
SWEEPS_PER_IDLE_TIME = 4
CLOSING_TIMEOUT_S = 1.0


class EnginePool:
    """The pool. Create it inside a running event loop; `close` closes all connections."""

    def __init__(self, connect_timeout_s: float, idle_s: float, trust: ssl.SSLContext) -> None:
        """`trust` verifies engines with `https` URLs."""
        self._connector = Connector(connect_timeout_s, trust)
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Origin, list[EngineConnection]] = {}
        """Idle connections, the most recently used one last. It is used first, so that the others can expire."""
        self._open: set[EngineConnection] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._all_gone: asyncio.Event | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_idle(self) -> int:
        return sum(map(len, self._idle.values()))

    async def take(self, origin: Origin) -> EngineConnection:
        """Return an idle connection or a new one. Raises `CannotConnect`."""
        kept = self._idle.get(origin)
        while kept:
            connection = kept.pop()
            if connection.is_reusable and self._loop.time() - connection.idle_since < self._idle_s:
                return connection
            connection.abort()
        return await self._connect(origin)

    def release(self, origin: Origin, connection: EngineConnection) -> None:
        num_kept = len(self._idle.get(origin, ()))
        if not connection.is_reusable or num_kept >= MAX_IDLE_PER_ORIGIN or self._all_gone is not None:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        self._idle.setdefault(origin, []).append(connection)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(self._idle_s / SWEEPS_PER_IDLE_TIME, self._sweep)

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._all_gone = asyncio.Event()
        self._idle.clear()
        for connection in self._open:
            connection.abort()
        if self._open:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSING_TIMEOUT_S):
                    await self._all_gone.wait()

    async def _connect(self, origin: Origin) -> EngineConnection:
        connection = await self._connector.connect(origin, lambda: EngineConnection(self._lost))
        if not connection.is_lost:
            self._open.add(connection)
        return connection

    def _lost(self, connection: EngineConnection) -> None:
        self._open.discard(connection)
        if self._all_gone is not None and not self._open:
            self._all_gone.set()

    def _sweep(self) -> None:
        """Close connections that were idle for `idle_s`, and forget origins without connections."""
        self._sweeping = None
        old = self._loop.time() - self._idle_s
        for origin, kept in list(self._idle.items()):
            young = [each for each in kept if each.is_reusable and each.idle_since > old]
            for each in set(kept).difference(young):
                each.abort()
            self._idle[origin] = young
            if not young:
                del self._idle[origin]
        if self._idle:
            self._sweeping = self._loop.call_later(self._idle_s / SWEEPS_PER_IDLE_TIME, self._sweep)
