"""An HTTP connection to an engine: sends one request and receives the head and body of its response.

The bytes of a body are not interpreted; a slow reader makes the engine stop sending. The sizes of the head and of the
unread body are limited. If the engine switches to another protocol, the connection is handed over to it. State streams
(`discovery.state_connection`) and the beginnings of links (`relay.links`) use it. The parser is httptools.
"""

from __future__ import annotations

import asyncio
from typing import cast

import httptools

MAX_HEAD_BYTES = 32 * 1024
"""Limit for the head, and for bytes outside the body such as an endless trailer."""
MAX_UNREAD_BYTES = 128 * 1024
"""With more unread bytes the socket is not read; one read may exceed the limit."""
_OK = 200
_SWITCHED = 101


class ConnectionBroken(ConnectionError):
    """The connection ended before the response, or the response is not HTTP."""


class EngineConnection(asyncio.Protocol):
    """A connection for one request: `ask`, then `receive` until it returns nothing.

    Create it inside a running event loop.
    """

    def __init__(self) -> None:
        self.status = 0
        """The response's status; 0 until its head has arrived."""
        self.has_ended = False
        """Whether the response is complete, even if it is not read yet."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._num_header_bytes = 0
        self._num_bodiless_bytes = 0
        """The bytes that were received since the last bytes of a body."""
        self._num_body_bytes = 0
        self._pieces: list[bytes] = []
        self._num_unread = 0
        self._reads = True
        self._error: Exception | None = None
        self._is_lost = False
        self._waiting: asyncio.Future[None] | None = None
        self._after_head = b""
        """What followed the head of a response that switches to another protocol."""

    # Methods for the user.

    async def ask(self, head: bytes) -> None:
        """Send a request without a body, and return when the head of the response has arrived.

        Raises `ConnectionBroken`.
        """
        self._transport.write(head)
        while not self.status:
            await self._changed()

    def header(self, name: bytes) -> str:
        """Return a header of the response, by its name in lower case; empty if it has none."""
        return self._headers.get(name, b"").decode("latin-1")

    async def receive(self) -> bytes:
        """Return the next bytes of the body, at least one; none at its end. Raises `ConnectionBroken`."""
        while not self._pieces:
            if self.has_ended:
                return b""
            await self._changed()
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._num_unread = 0
        if not self._reads and not self._transport.is_closing():
            self._reads = True
            self._transport.resume_reading()
        return data

    def hand_over(self, protocol: asyncio.Protocol) -> None:
        """Let `protocol` go on with the connection, whose engine has switched to it. Raises `ConnectionBroken`."""
        if self._error is not None or self._is_lost or self._transport.is_closing():
            raise ConnectionBroken("the engine hung up")
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if self._after_head:
            protocol.data_received(self._after_head)

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _changed(self) -> asyncio.Future[None]:
        """Return a future that is done at the next event of the connection. Raises its error, if it has one."""
        if self._error is not None:
            raise self._error
        self._waiting = self._loop.create_future()
        return self._waiting

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.status == _SWITCHED and len(self._after_head) <= MAX_UNREAD_BYTES:
            self._after_head += data
            return
        if self.has_ended or self._error is not None:
            self._transport.abort()  # nothing may follow the response
            return
        num_body_bytes = self._num_body_bytes
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as switched:
            if self.status == _SWITCHED:
                self._after_head = data[switched.args[0] :]
            else:
                self._give_up("the answer cannot be read: it switches to another protocol")
        except httptools.HttpParserError as error:
            self._give_up(f"the answer cannot be read: {error}")
        if self._num_body_bytes == num_body_bytes:
            self._num_bodiless_bytes += len(data)
            if self._num_bodiless_bytes > MAX_HEAD_BYTES and not self.has_ended:
                self._give_up("the head of the answer is too large")
        else:
            self._num_bodiless_bytes = 0
            if self._num_unread > MAX_UNREAD_BYTES and self._reads and not self._transport.is_closing():
                self._reads = False
                self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if not self.has_ended and self._error is None:
            if error is None and self._ends_with_connection():
                self.has_ended = True
            else:
                self._error = ConnectionBroken(str(error or "the engine hung up"))
        self._wake()

    def _ends_with_connection(self) -> bool:
        """Whether the response has no length, so that it ends when the connection is closed."""
        is_chunked = b"chunked" in self._headers.get(b"transfer-encoding", b"").lower()
        return self.status != 0 and not is_chunked and b"content-length" not in self._headers

    def _give_up(self, reason: str) -> None:
        """Abort the connection. Received bytes can still be read, and a complete response stays complete."""
        self._transport.abort()
        if not self.has_ended and self._error is None:
            self._error = ConnectionBroken(reason)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        if self.has_ended:
            raise ConnectionBroken("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status:
            return  # a trailer
        self._headers[name.lower()] = value
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > MAX_HEAD_BYTES:
            raise ConnectionBroken("the head of the answer is too large")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= _OK or status == _SWITCHED:
            self.status = status

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._num_unread += len(body)
        self._num_body_bytes += len(body)

    def on_message_complete(self) -> None:
        if not self.status:
            self._headers = {}  # this was an interim response (1xx); the final one follows
            return
        self.has_ended = True
