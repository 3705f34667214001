"""One connection to an engine: sends a request, receives head and body of its answer; then the next one.

Bytes of a body are passed on unread as they come; a slow reader stops the engine's sending. What peers may make the
gateway hold is bounded: the head, and unread bytes. The connection decides whether it may be used again, `engine_pool`
which request uses it; what an answer means is decided by `upstream`. httptools parses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

MAX_HEAD_BYTES = 32 * 1024
"""For the head, and for anything else outside the body: a trailer that never ends."""
MAX_UNREAD_BYTES = 128 * 1024
"""Above it the connection is not read. One more read of the socket may be added."""
PIECE_BYTES = 128 * 1024
"""A large request is sent in such pieces: a huge prompt must not be copied into the transport at once."""
_OK = 200


class ConnectionBroken(ConnectionError):
    """The connection ended before the answer did, or the answer is not HTTP."""


class EngineConnection(asyncio.Protocol):
    """Create inside a running event loop. One request at a time: `ask`, then `receive` until it gives nothing."""

    def __init__(self, on_lost: Callable[[EngineConnection], None]) -> None:
        self.status = 0
        """Of the answer; 0 until its head has arrived."""
        self.has_ended = True
        """The answer is complete, although it may not be read; so it is before the first request."""
        self.idle_since = 0.0
        """Set by the pool."""
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._headers: dict[bytes, bytes] = {}
        self._num_header_bytes = 0
        self._num_bodiless_bytes = 0
        """Received since the last bytes of the body."""
        self._num_body_bytes = 0
        self._pieces: list[bytes] = []
        self._num_unread = 0
        self._reads = True
        self._may_write = True
        self._is_sent = self._is_new = True
        self._keeps_alive = True
        self._error: Exception | None = None
        self._is_lost = False
        self._waiting: asyncio.Future[None] | None = None

    # What the user calls.

    @property
    def is_reusable(self) -> bool:
        """Nothing of the previous request is left on it in either direction, and the engine keeps it open."""
        return (
            self.has_ended
            and self._keeps_alive
            and self._is_sent
            and not self._pieces
            and not self._is_lost
            and not self._transport.is_closing()
            and (self._is_new or not self._transport.get_write_buffer_size())  # a new one may hold TLS's handshake
        )

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    async def ask(self, head: bytes, body: bytes) -> None:
        """Returns when the head of the answer has arrived. Raises `ConnectionBroken`."""
        if not self.is_reusable:
            raise ConnectionBroken("the engine hung up")
        self.status = self._num_header_bytes = self._num_bodiless_bytes = 0
        self.has_ended = self._is_sent = self._is_new = False
        self._headers = {}
        self._parser = httptools.HttpResponseParser(self)
        if len(body) <= PIECE_BYTES:
            self._transport.write(head + body)
            self._is_sent = True
        else:
            await self._send_in_pieces(head, body)
        while not self.status:
            await self._changed()

    def header(self, name: bytes) -> str:
        """Of the answer; the name in lower case. Empty: it has none."""
        return self._headers.get(name, b"").decode("latin-1")

    async def receive(self) -> bytes:
        """The next bytes of the body, at least one; none after the last. Raises as `ask` does."""
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

    def abort(self) -> None:
        """Close at once without sending the rest; the engine notices that the answer is not read any more."""
        self._transport.abort()

    async def _send_in_pieces(self, head: bytes, body: bytes) -> None:
        """Nothing more is sent to an engine that answers before it has read everything."""
        self._transport.write(head)
        rest = memoryview(body)
        while rest and not self.status and self._error is None:
            if not self._may_write:
                await self._changed()
                continue
            self._transport.write(bytes(rest[:PIECE_BYTES]))
            rest = rest[PIECE_BYTES:]
            await asyncio.sleep(0)  # other answers have to be passed on meanwhile
        self._is_sent = not rest

    def _changed(self) -> asyncio.Future[None]:
        """Done at the next change."""
        if self._error is not None:
            raise self._error
        self._waiting = self._loop.create_future()
        return self._waiting

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.has_ended or self._error is not None:
            self._transport.abort()  # no request is waiting
            return
        num_body_bytes = self._num_body_bytes
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
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

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if not self.has_ended and self._error is None:
            if error is None and self._ends_with_connection():
                self.has_ended, self._keeps_alive = True, False
            else:
                self._error = ConnectionBroken(str(error or "the engine hung up"))
        self._wake()
        self._on_lost(self)

    def _ends_with_connection(self) -> bool:
        """An answer that does not give its length."""
        is_chunked = b"chunked" in self._headers.get(b"transfer-encoding", b"").lower()
        return self.status != 0 and not is_chunked and b"content-length" not in self._headers

    def _give_up(self, reason: str) -> None:
        """What came before can still be read; an answer that is complete stays complete."""
        self._transport.abort()
        if not self.has_ended and self._error is None:
            self._error = ConnectionBroken(reason)

    # What the parser calls.

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
        if status >= _OK:
            self.status = status

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._num_unread += len(body)
        self._num_body_bytes += len(body)

    def on_message_complete(self) -> None:
        if not self.status:
            self._headers = {}  # of an interim answer; its final one follows
            return
        self.has_ended = True
        self._keeps_alive = self._parser.should_keep_alive()
