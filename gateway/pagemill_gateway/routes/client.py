"""The response to one client, which is started as late as possible, so that a failure can have its own status.

Each write waits until the client has read the previous one (back-pressure), up to a timeout.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import Send

from pagemill_api.dialects.base import Dialect
from pagemill_api.dialects.transport import SSE
from pagemill_gateway.limits.in_flight_limit import InFlightSlot
from pagemill_gateway.repeated_timeout import RepeatedTimeout
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.frames import PartMeta
from pagemill_protocol.link import WINDOW_BYTES
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_servers.direct import DirectResponse

STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
LAST_WRITE_TIMEOUT_S = 5.0
"""The timeout of the last write, of an error to a client that may be gone."""
PIECE_BYTES = 64 * 1024
"""A larger body is sent in pieces, each when the client has read the one before."""
UNREAD_BYTES = 2 * WINDOW_BYTES
"""What an answer holds at most while its client does not read, besides the piece that waits: in the client's
connection, in the relay, and in the engine's link."""


class ClientTooSlow(Exception):
    """The client has read nothing for too long."""


class ClientResponse:
    def __init__(
        self, send: Send, slow_timeout_s: float, dialect: Dialect, direct: DirectResponse | None = None
    ) -> None:
        """`direct` is the same response without the middleware, which only needs to see the head."""
        self._send = send
        self._direct = direct
        self.is_slow: Callable[[], bool] = _never if direct is None else lambda: direct.is_slow
        """Returns whether the client has not read what was written, so that the next write waits."""
        self._dialect = dialect
        self._timeout = RepeatedTimeout(slow_timeout_s)
        self._slow_timeout_s = slow_timeout_s
        self.slot: InFlightSlot | None = None
        """The slot that counts what the client does not read; set when the request has one."""
        self.request: GenerateRequest | None = None
        """The first engine request, once it is prepared."""
        self.max_seen_bytes = math.inf
        """The size above which `on_answer` need not see a body."""
        self.started = False
        self.is_body = False
        """Whether the answer is one body, not a stream."""
        self.is_aborted = False
        """Whether the connection was closed within the answer."""
        self._is_within = False
        """Whether a part of a body or of an event was sent and the rest was not."""
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
        if self.on_answer is not None and len(body) <= self.max_seen_bytes:
            await self.on_answer(body)
        await self._start_body(body, len(body))
        if len(body) <= PIECE_BYTES:
            await self._send_in_time(body, more=False)
            return
        self._is_within = True
        await self._send_in_pieces(body)
        await self.end()

    def abort(self) -> None:
        """Close the client's connection, so that an incomplete answer does not look complete."""
        self.is_aborted = True
        if self._direct is not None:
            self._direct.abort()

    # Calls of sinks.

    def hold(self, num_bytes: int) -> None:
        """Count bytes of the answer. Raises `PagemillError` 429 or 503."""
        if self.slot is not None:
            self.slot.hold(num_bytes)

    def release(self, num_bytes: int) -> None:
        if self.slot is not None:
            self.slot.release(num_bytes)

    def passes(self, num_bytes: int) -> bool:
        """Whether a payload of this many bytes may be sent in parts: nothing else needs it whole."""
        if self.on_answer is not None and num_bytes <= self.max_seen_bytes:
            return False
        return not self.is_body or self._dialect.transport.body_headers is SSE.body_headers

    async def write_part(self, data: bytes, meta: PartMeta) -> None:
        """Write the next part of a body, or of an event of a stream that may have begun."""
        if not self.started:
            await (self._start_body(data, meta.num_payload_bytes) if self.is_body else self._start_stream())
        self._is_within = True
        await self._send_in_pieces(data)
        self._is_within = not meta.is_end

    async def _send_in_pieces(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            await self._send_in_time(data[start : start + PIECE_BYTES], more=True)

    async def _start_body(self, beginning: bytes, num_bytes: int) -> None:
        self.started = True
        headers = self._dialect.transport.body_headers(beginning)
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._start(200, [*raw, (b"content-length", b"%d" % num_bytes)])

    async def fail(self, error: PagemillError, num_events: int = 0) -> None:
        """Send the error as the response, or as the last event of a stream that has started.

        Where neither is possible, the connection is closed. `num_events`: the events that the client has got, of a
        stream that numbers them.
        """
        if self._is_within:
            self.abort()
            return
        if self.started:
            await self._send_last(self._dialect.numbered_error_event(error, num_events, self.request))
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
        sending = self._send({"type": "http.response.body", "body": data, "more_body": more})
        try:
            if self.slot is not None and self.is_slow():
                await self._send_unread(sending, len(data), self.slot)
            else:
                await self._timeout.wait(sending)
        except TimeoutError:
            raise ClientTooSlow from None

    async def _send_unread(self, sending: Awaitable[None], num_bytes: int, slot: InFlightSlot) -> None:
        """Wait until the client reads. Raises `TimeoutError` also if its tenant has too many unread bytes."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._slow_timeout_s) as limit:
            with slot.unread(num_bytes + UNREAD_BYTES, lambda: limit.reschedule(loop.time())):
                await sending

    async def _send_last(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(LAST_WRITE_TIMEOUT_S):
                await self._send({"type": "http.response.body", "body": data, "more_body": False})
        except TimeoutError:
            raise ClientTooSlow from None


def _never() -> bool:
    return False
