"""The links of one gateway process: one to each engine, opened with its first request and shared by all later ones."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple

from pagemill_gateway.engine_http.connecting import Connector, Origin, request_head
from pagemill_gateway.engine_http.engine_connection import ConnectionBroken, EngineConnection
from pagemill_gateway.relay.engine_link import Backlog, EngineLink, LinkTimeouts
from pagemill_protocol.link import FREED_HEADER, LINK_PATH, LINK_PROTOCOL
from pagemill_routing.attempts.attempt_failures import MAX_ERROR_BYTES, link_refusal

IDLE_S = 300.0
"""A link without requests for this long is closed, because its engine may be gone from the catalogue."""
HANDSHAKE_TIMEOUT_S = 5.0
Key = tuple[Origin, str]
"""An engine and its token."""


class _Opening(NamedTuple):
    task: asyncio.Task[EngineLink]
    waiters: list[asyncio.Future[None]]
    """The waiting requests in order of arrival."""


class Links:
    """All links. Create it inside a running event loop; `close` closes them."""

    def __init__(self, connect_timeout_s: float, trust: ssl.SSLContext, timeouts: LinkTimeouts) -> None:
        self._connector = Connector(connect_timeout_s, trust)
        self._timeouts = timeouts
        self._backlog = Backlog()
        self._links: dict[Key, EngineLink] = {}
        self._opening: dict[Key, _Opening] = {}

    @property
    def num_open(self) -> int:
        return sum(link.is_usable for link in self._links.values())

    def ready(self, origin: Origin, token: str) -> EngineLink | None:
        """Return the open link, or `None`."""
        link = self._links.get((origin, token))
        return link if link is not None and link.is_usable else None

    async def open(self, origin: Origin, token: str) -> EngineLink:
        """Open a link, the same one for concurrent callers.

        Requests continue in order of arrival, because their cached tokens were predicted in that order. Raises
        `UpstreamFailure` if the engine refuses the link, `CannotConnect`, or `OSError` if it hangs up.
        """
        key = origin, token
        opening = self._opening.get(key)
        if opening is None:
            opening = self._opening[key] = _Opening(asyncio.create_task(self._open(key)), [])
            opening.task.add_done_callback(lambda task: self._go_on(key))
        waiter = asyncio.get_running_loop().create_future()
        opening.waiters.append(waiter)
        await waiter
        return opening.task.result()

    async def close(self) -> None:
        tasks = [opening.task for opening in self._opening.values()]
        for task in tasks:
            task.cancel()
        opened = await asyncio.gather(*tasks, return_exceptions=True)
        for link in (*self._links.values(), *opened):
            if isinstance(link, EngineLink):
                link.abort()
        self._links.clear()

    async def _open(self, key: Key) -> EngineLink:
        origin, token = key
        fields = "Connection: Upgrade", f"Upgrade: {LINK_PROTOCOL}", f"{FREED_HEADER}: 1"
        head = request_head(f"GET {LINK_PATH}", origin, token, *fields)
        connection = await self._connector.connect(origin, EngineConnection)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await connection.ask(head)
                if connection.status != HTTPStatus.SWITCHING_PROTOCOLS:
                    body = await _bounded_body(connection)
                    raise link_refusal(connection.status, body, connection.header(b"retry-after") or None)
            link = EngineLink(self._timeouts, IDLE_S, self._backlog)
            connection.hand_over(link)
        except BaseException:
            connection.abort()
            raise
        return link

    def _go_on(self, key: Key) -> None:
        """Wake the waiting requests; store the link for later requests when none waits any more."""
        task, waiters = self._opening[key]
        if not waiters:
            del self._opening[key]
            with suppress(Exception, asyncio.CancelledError):  # the waiters got the error
                link = task.result()
                self._links = {other: each for other, each in self._links.items() if each.is_usable}
                self._links[key] = link
            return
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        waiters.clear()
        # Called again after the woken requests and those that arrive in the meantime.
        asyncio.get_running_loop().call_soon(self._go_on, key)


async def _bounded_body(connection: EngineConnection) -> bytes:
    """Return the body of a refusal; empty if it is too long or breaks off, because its status says enough."""
    body = b""
    with suppress(ConnectionBroken):
        while data := await connection.receive():
            body += data
            if len(body) > MAX_ERROR_BYTES:
                return b""
    return body
