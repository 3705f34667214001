"""The client's end of one response: starts it as late as possible, so that a failure can still have its own status.

Every write waits until the client has taken what came before (back-pressure), but not for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import Send

from pagemill_gateway.patience import Patience
from pagemill_protocol.dialects.base import SSE_CONTENT_TYPE, Dialect
from pagemill_protocol.errors import PagemillError

SSE_HEADERS = [
    (b"content-type", SSE_CONTENT_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
FAREWELL_TIMEOUT_S = 5.0
"""For the error event of a stream whose reader may be gone."""


class ClientTooSlow(Exception):
    """The client has taken nothing for too long; its connection is no use any more."""


class ClientResponse:
    def __init__(self, send: Send, slow_timeout_s: float, dialect: Dialect) -> None:
        self._send = send
        self._dialect = dialect
        self._patience = Patience(slow_timeout_s)
        self.started = False
        self._starting = asyncio.Lock()
        self._more_headers: list[tuple[bytes, bytes]] = []

    def close(self) -> None:
        """Nothing more is written."""
        self._patience.close()

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Of whatever the answer will be; too late for one that waits already."""
        self._more_headers += [(name.encode(), value.encode()) for name, value in headers.items()]

    async def write(self, data: bytes) -> None:
        """Part of a stream of events, whole: comments may come in between. Raises `ClientTooSlow`."""
        if not self.started:
            await self._start_stream()
        await self._send_patiently(data, more=True)

    async def end(self) -> None:
        await self._send_patiently(b"", more=False)

    async def send_json(self, body: bytes) -> None:
        self.started = True
        await self._start(200, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))])
        await self._send_patiently(body, more=False)

    async def fail(self, error: PagemillError) -> None:
        """Tell the client: as the response while there is none, else as the event that ends the stream."""
        if self.started:
            await self._bid_farewell(self._dialect.error_event(error))
            return
        self.started = True
        body = self._dialect.error_body(error)
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
        await self._start(error.status, [(name.encode(), value.encode()) for name, value in headers.items()])
        await self._bid_farewell(body)

    async def _start_stream(self) -> None:
        async with self._starting:
            if not self.started:
                await self._start(200, SSE_HEADERS)
                self.started = True

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._more_headers]})

    async def _send_patiently(self, data: bytes, *, more: bool) -> None:
        try:
            await self._patience.wait(self._send({"type": "http.response.body", "body": data, "more_body": more}))
        except TimeoutError:
            raise ClientTooSlow from None

    async def _bid_farewell(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                await self._send({"type": "http.response.body", "body": data, "more_body": False})
        except TimeoutError:
            raise ClientTooSlow from None
