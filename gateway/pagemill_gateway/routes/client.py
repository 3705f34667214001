"""The response to one client, which is started as late as possible, so that a failure can have its own status.

Each write waits until the client has read the previous one (back-pressure), up to a timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import Send

from pagemill_api.dialects.base import Dialect
from pagemill_gateway.repeated_timeout import RepeatedTimeout
from pagemill_protocol.errors import PagemillError
from pagemill_servers.direct import DirectResponse

STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
LAST_WRITE_TIMEOUT_S = 5.0
"""The timeout of the last write, of an error to a client that may be gone."""


class ClientTooSlow(Exception):
    """The client has read nothing for too long."""


class ClientResponse:
    def __init__(
        self, send: Send, slow_timeout_s: float, dialect: Dialect, direct: DirectResponse | None = None
    ) -> None:
        """`direct` is the same response without the middleware, which only needs to see the head."""
        self._send = send
        self._direct = direct
        self._dialect = dialect
        self._timeout = RepeatedTimeout(slow_timeout_s)
        self.started = False
        self._starting = asyncio.Lock()
        self._more_headers: list[tuple[bytes, bytes]] = []
        self.on_answer: Callable[[bytes], Awaitable[None]] | None = None
        """Called with the body of a whole answer, or each part of a stream, before it is sent to the client."""

    def close(self) -> None:
        """End writing."""
        self._timeout.close()

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Add headers to the response, unless it has started."""
        self._more_headers += [(name.encode(), value.encode()) for name, value in headers.items()]

    async def write(self, data: bytes) -> None:
        """Write one or more whole events of a stream. Raises `ClientTooSlow`."""
        if self.on_answer is not None:
            await self.on_answer(data)
        direct, is_first = self.direct, not self.started
        if is_first:
            if direct is not None:
                direct.cork()
            await self._start_stream()
        if direct is None or not direct.write_now(data):
            await self._send_in_time(data, more=True)
        if is_first and direct is not None:
            direct.uncork()

    @property
    def direct(self) -> DirectResponse | None:
        """The direct response for events; `None` if `on_answer` must see them first."""
        return self._direct if self.on_answer is None else None

    async def end(self) -> None:
        await self._send_in_time(b"", more=False)

    async def send_body(self, body: bytes) -> None:
        if self.on_answer is not None:
            await self.on_answer(body)
        self.started = True
        headers = self._dialect.transport.body_headers(body)
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._start(200, [*raw, (b"content-length", b"%d" % len(body))])
        await self._send_in_time(body, more=False)

    async def fail(self, error: PagemillError) -> None:
        """Send the error as the response, or as the last event of a stream that has started."""
        if self.started:
            await self._send_last(self._dialect.error_event(error))
            return
        self.started = True
        body = self._dialect.error_body(error)
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
        await self._start(error.status, [(name.encode(), value.encode()) for name, value in headers.items()])
        await self._send_last(body)

    async def _start_stream(self) -> None:
        async with self._starting:
            if not self.started:
                content_type = (b"content-type", self._dialect.transport.stream_type.encode())
                await self._start(200, [content_type, *STREAM_HEADERS])
                self.started = True

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._more_headers]})

    async def _send_in_time(self, data: bytes, *, more: bool) -> None:
        try:
            await self._timeout.wait(self._send({"type": "http.response.body", "body": data, "more_body": more}))
        except TimeoutError:
            raise ClientTooSlow from None

    async def _send_last(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(LAST_WRITE_TIMEOUT_S):
                await self._send({"type": "http.response.body", "body": data, "more_body": False})
        except TimeoutError:
            raise ClientTooSlow from None
