"""Bounds on what happens before ASGI, invisible to `request_middleware`, such as headers that never end.

`bounded_protocol(...)` makes the `http=` class of a `uvicorn.Config`. A request is read only once the one before it is
answered and the client reads its answers; the bytes behind it wait as they came, or are dropped if they are many. A
body of many small chunks is parsed in turn with other connections. Request heads above a size, a number of headers or a
time get 431 or 408 and the connection closes, and the heads of all connections have one budget (`connection_limits`,
which also bounds the connections); a silent connection is closed; trailers are dropped; a malformed request gets a 400
in OpenAI's shape, also if its body's framing breaks before the answer has begun. When a connection ends, the request
being answered is notified at once, whatever it has sent. Offers of other protocols (WebSocket, h2c) are ignored, as
HTTP allows, except those of `upgrades`, for which an app may take over the connection (`direct`); HTTP/1.0 clients get
no chunked encoding. Requests refused here get an id and a log line, since no app sees them. `client_transport` bounds
how long an answer may remain unread.

httptools does the parsing. Import this module only where uvicorn is installed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import httptools
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from pagemill_protocol.errors import PagemillError, headers_too_large, request_timeout, unavailable
from pagemill_protocol.ids import new_id
from pagemill_servers.client_transport import MAX_DISCARDED_BYTES, ClientTransport
from pagemill_servers.connection_limits import ConnectionLimits, Place, Turns, unmapped
from pagemill_servers.direct import (
    PLACE_EXTENSION,
    RESPONSE_EXTENSION,
    UPGRADE_EXTENSION,
    DirectResponse,
    UpgradedProtocol,
)

logger = logging.getLogger(__name__)

MAX_HEADERS = 100
HEADER_OBJECT_BYTES = 128
"""Memory of a parsed header beyond its bytes."""
MAX_READ_AHEAD_BYTES = 64 * 1024
"""Bytes behind a request being answered at which reading stops."""
READ_AHEAD_WAIT_S = 0.1
"""How long reading stops before these bytes are dropped, to notice a client that left; pipelined requests that are
answered faster are all served.
"""
END_OF_HEAD = b"\r\n\r\n"
CHUNKED = -1
"""In place of the number of bytes of a body: its end is an empty chunk."""
CHUNKED_PIECE_BYTES = 8 * 1024
MAX_PIECE_CHUNKS = 64
"""Chunks in a piece of a body beyond which the rest waits for a later turn of the event loop: those of a byte take some
0.3 ms per piece, and 10 ms for all that one read may return."""


def bounded_protocol(
    max_header_bytes: int = 64 * 1024,
    header_timeout_s: float = 15.0,
    upgrades: Collection[str] = (),
    *,
    limits: ConnectionLimits | None = None,
    write_timeout_s: float = 120.0,
) -> type[asyncio.Protocol]:
    """Return a uvicorn HTTP protocol class with these bounds on each connection and on the head of each request.

    `upgrades`: protocols for which the app may take over a connection. `limits`: those of all connections together.
    `write_timeout_s`: time for a client to read on.
    """
    bounds = {
        "max_header_bytes": max_header_bytes,
        "header_timeout_s": header_timeout_s,
        "upgrades": frozenset(upgrades),
        "limits": limits or ConnectionLimits(),
        "write_timeout_s": write_timeout_s,
        "turns": Turns(),
    }
    return type("BoundedProtocol", (_BoundedProtocol,), bounds)


class _BoundedProtocol(HttpToolsProtocol):
    max_header_bytes: int
    header_timeout_s: float
    upgrades: frozenset[str]
    limits: ConnectionLimits
    turns: Turns
    write_timeout_s: float

    _client: ClientTransport
    """The same as `transport`."""
    _reading: _Reading
    """The same as `flow`."""
    _place: Place | None = None

    _head_timer: asyncio.TimerHandle | None = None
    _head_open = False
    _unparsed_bytes = 0
    """Bytes received since the parser last made progress: a growing head or trailer, or chunk extensions."""
    _head_bytes = 0
    """Size of the head of the request being answered."""
    _parsed_tail = b""
    """The last bytes that were parsed, as far as they may begin the end of a head."""
    _body_left = 0
    """Bytes that the body of the request being read still has, or `CHUNKED`."""
    _held = b""
    """Bytes behind a request that is being answered, or the rest of small chunks, from `_held_from` on."""
    _held_from = 0
    _num_chunks = 0
    """Chunks of the piece being parsed."""
    _ahead_timer: asyncio.TimerHandle | None = None
    _num_dropped = 0
    """Bytes behind the request being answered that were dropped."""
    _fault: PagemillError | None = None
    """Why a request is refused that is valid HTTP."""

    _left: RequestResponseCycle | None = None
    """The request that was notified of the end of its connection."""
    _direct: DirectResponse | None = None
    """The response to the request being answered."""
    _upgrade = ""
    """The protocol offered by the latest head."""
    _next_upgrade = ""
    """The protocol offered by a head that is parsed again without the offer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:
            self.client = unmapped(self.client[0]), self.client[1]
        self.flow = self._reading = _Reading(transport)
        self._client = ClientTransport(transport, self.write_timeout_s, self._read_rest)
        self.transport = self._client  # type: ignore[assignment]
        try:
            self._place = self.limits.open(self.client[0] if self.client else None, self._client.abort)
        except PagemillError as error:
            self._refuse(error)
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_ahead_timer()
        self._client.lost()
        if self._place is not None:
            self._place.release()
        self._notify_disconnect()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Let the connection close. Its request ends now, although unsent bytes may keep the connection open."""
        self._notify_disconnect()
        self._client.bound_writes()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._client.bound_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._client.stop_bounding()
        self._read_held()

    def shutdown(self) -> None:
        super().shutdown()
        self._client.end_discarding()

    def data_received(self, data: bytes) -> None:
        if self._client.is_closing():
            self._client.discarded(len(data))
            return
        self._unset_keepalive_if_required()
        self._read(self._held[self._held_from :] + data if self._held else data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_open = True
        self._upgrade, self._next_upgrade = self._next_upgrade, ""
        self._start_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_open:
            return
        if len(self.headers) == MAX_HEADERS:
            raise self._refusal(headers_too_many())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._stop_head_timer()
        self._body_left = self._body_length()
        if not self._holds(self._unparsed_bytes):
            raise self._refusal(heads_over_budget())
        self._head_open = False
        self._head_bytes, self._unparsed_bytes = self._unparsed_bytes, 0
        self._occupy_place()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        self._num_chunks += 1
        if self._body_left > 0:
            self._body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        if self.parser.should_upgrade():
            return
        self._body_left = 0
        super().on_message_complete()
        if self.flow.read_paused:
            self.flow.resume_reading()  # the end of the connection is read, too

    def on_response_complete(self) -> None:
        cycle: Any = self.cycle
        if self._direct is not None:
            self._direct.uncork()
        # The extensions refer to the request: without this, only the garbage collector would free the cycle. An idle
        # connection keeps no head.
        cycle.scope["extensions"] = {}
        cycle.scope = {}
        self.scope = self.headers = None  # type: ignore[assignment]
        self._head_bytes = 0
        if self._place is not None:
            self._place.hold(0)
            self._place.become_idle()
        super().on_response_complete()
        if not self._client.is_closing():
            self._client.bound_writes()
            self._read_held()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._direct = DirectResponse(cycle)
        extensions: dict[str, object] = {RESPONSE_EXTENSION: self._direct, PLACE_EXTENSION: self._place}
        if self._upgrade in self.upgrades:
            extensions[UPGRADE_EXTENSION] = partial(self._take_over, self._upgrade)
        scope: Any = cycle.scope
        scope["extensions"] = extensions
        answering: Any = _unchunked(cycle, app) if cycle.scope["http_version"] == "1.0" else app
        self.turns.begin(partial(super()._start_asgi_task, cycle, answering), self.loop)

    def _read(self, data: bytes, start: int = 0) -> None:
        """Parse at most one request of `data` from `start` on, and hold what is behind it."""
        self._held = b""
        try:
            end = self._parse(data, start)
        except httptools.HttpParserError:
            fault, self._fault = self._fault, None
            self._refuse(fault or PagemillError("The request is not valid HTTP.", code="invalid_http"))
            return
        if self._client.is_closing() or self.parser is None:
            return
        if end < len(data) and not self._must_wait:
            self._rest(data, end)
        elif end < len(data):
            self._hold(data, end)
        elif self._unparsed_bytes > self.max_header_bytes:
            self._refuse(headers_too_large(self.max_header_bytes))
        elif self._unparsed_bytes and not self._holds(self._unparsed_bytes):
            self._refuse(heads_over_budget())
        elif not self._answering:  # line breaks between requests ended the wait for the next one and begin none
            self._start_head_timer()

    def _rest(self, data: bytes, start: int) -> None:
        """Let other connections have their turns before the next piece of a chunked body is parsed."""
        self._held, self._held_from = data, start
        self._reading.rest()
        self.turns.wait(self._end_rest, self.loop)

    def _end_rest(self) -> None:
        data, self._held = self._held, b""
        self._holds(0)
        self._reading.end_rest()
        if data and not self._client.is_closing() and self.parser is not None:
            self._read(data, self._held_from)

    def _read_rest(self) -> bool:
        """Read what the client is sending of a request that will not be read. Return false if it sends none."""
        if not (self._head_open or self._body_left or self._num_dropped):
            return False
        self._reading.go_on()
        return True

    def _hold(self, data: bytes, start: int) -> None:
        """Keep the bytes behind a request until it is answered, or drop them if there is no memory for them."""
        if self._answering and (self._num_dropped or not self._holds(len(data))):
            self._drop(len(data) - start)
            return
        if not self._holds(len(data)):
            self._refuse(heads_over_budget())
            return
        self._held, self._held_from = data, start
        if len(data) - start > MAX_READ_AHEAD_BYTES:
            self._reading.stop()
            if self._ahead_timer is None:
                self._ahead_timer = self.loop.call_later(READ_AHEAD_WAIT_S, self._drop_held)

    def _drop_held(self) -> None:
        self._ahead_timer = None
        if self._answering and self._held:
            held, self._held = self._held, b""
            self._drop(len(held) - self._held_from)
            self._reading.go_on()

    def _drop(self, num_bytes: int) -> None:
        """Drop bytes behind the request being answered, after which the connection closes.

        Then reading goes on, because only that shows the end of the connection, whose request must not run on.
        """
        self.cycle.keep_alive = False
        self._holds(0)
        self._num_dropped += num_bytes
        if self._num_dropped > MAX_DISCARDED_BYTES:
            self._client.abort()

    def _read_held(self) -> None:
        """Read the next request if it has arrived, the answers before it are complete, and the client reads them."""
        if not self._held or self._must_wait or self._client.is_closing():
            return
        self._unset_keepalive_if_required()
        self._stop_ahead_timer()
        self._reading.go_on()
        self._read(self._held, self._held_from)

    def _stop_ahead_timer(self) -> None:
        if self._ahead_timer is not None:
            self._ahead_timer.cancel()
            self._ahead_timer = None

    @property
    def _must_wait(self) -> bool:
        """Whether the next request may not be read yet."""
        is_between_requests = not self._head_open and not self._body_left
        return is_between_requests and (self._answering or self.flow.write_paused)

    def _holds(self, num_bytes: int) -> bool:
        """Count these bytes beside the head of the request being answered. Return whether the budgets allow them."""
        num_objects = len(self.headers) if self.headers is not None else 0
        num_bytes += self._head_bytes + HEADER_OBJECT_BYTES * num_objects
        return self._place is None or self._place.hold(num_bytes)

    def _occupy_place(self) -> None:
        """Count this connection as busy, and a proxy's for the client that it forwards for."""
        place = self._place
        if place is None:
            return
        place.become_busy()
        if place.is_proxy:
            forwarded = [value for name, value in self.headers if name == b"x-forwarded-for"]
            try:
                place.forward_for(self.limits.forwarded_client(forwarded, self.client[0] if self.client else ""))
            except PagemillError as error:
                raise self._refusal(error) from None

    def _body_length(self) -> int:
        """Return the length of the request's body, or `CHUNKED`. Raises for a coding that is not read here."""
        length, codings = 0, b""
        for name, value in self.headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                codings = codings + b"," + value if codings else value
        if not codings:
            return length
        if codings.strip().lower() != b"chunked" or self.parser.get_http_version() == "1.0":
            raise self._refusal(unknown_transfer_coding(codings))
        return CHUNKED

    def _refusal(self, error: PagemillError) -> httptools.HttpParserError:
        """Return an exception that makes the parser stop and the request be refused with `error`."""
        self._fault = error
        return httptools.HttpParserError(error.message)

    def _parse(self, data: bytes, start: int) -> int:
        """Parse `data` from `start` to the end of a request whose answer is to come first, or of a piece of many chunks
        if there is memory to keep what is behind it. Return where that is."""
        while start < len(data) and not self._must_wait:
            end = self._end_of_piece(data, start)
            self._unparsed_bytes += end - start
            self._num_chunks = 0
            self._feed(data if end - start == len(data) else memoryview(data)[start:end])
            start = end
            if self._num_chunks > MAX_PIECE_CHUNKS and start < len(data) and self._holds(len(data)):
                break
        return start

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """Return the end of a piece in which no second request begins."""
        if self._body_left > 0:
            return min(len(data), start + self._body_left)
        end = min(len(data), start + CHUNKED_PIECE_BYTES) if self._body_left == CHUNKED else len(data)
        tail, self._parsed_tail = self._parsed_tail, b""
        if tail and (found := (tail + data[start : min(end, start + 3)]).find(END_OF_HEAD)) >= 0:
            return start + found + len(END_OF_HEAD) - len(tail)
        found = data.find(END_OF_HEAD, start, end)
        if found >= 0:
            return found + len(END_OF_HEAD)
        self._parsed_tail = (tail + data[start:end])[-3:] if end - start < 3 else data[end - 3 : end]
        return end

    def _feed(self, rest: bytes | memoryview) -> None:
        """Parse a piece; a request that offers another protocol is parsed again without the offer.

        httptools attributes all bytes after such a head to that protocol: it would drop the body, or read it as a
        request.
        """
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                rest = memoryview(rest)[offer.args[0] :]
                head = self._head_without_upgrade()
                self._next_upgrade = next(
                    (value.decode("latin-1").lower() for name, value in self.headers if name == b"upgrade"), ""
                )
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError("a tunnel")
        headers = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, self.parser.get_http_version().encode(), headers)

    def _take_over(self, name: str, successor: UpgradedProtocol, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Answer 101 and hand the connection over to `successor`."""
        cycle = self.cycle
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        self._stop_head_timer()
        self.connections.discard(self)
        self.connections.add(successor)  # type: ignore[arg-type]
        successor.on_lost = partial(self._on_successor_lost, successor)
        self.transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %b\r\n%b\r\n"
            % (name.encode("latin-1"), b"".join(b"%b: %b\r\n" % each for each in headers))
        )
        transport = self._client.unwrapped()
        transport.set_protocol(successor)
        successor.connection_made(transport)

    def _on_successor_lost(self, successor: UpgradedProtocol) -> None:
        self.connections.discard(successor)
        if self._place is not None:
            self._place.release()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _may_answer(self) -> bool:
        """Whether a refusal may be written now: no answer to the request, or to an earlier one, has begun."""
        return not self._answering or not self.cycle.response_started

    def _notify_disconnect(self) -> None:
        """Notify the request being answered that the client is gone."""
        if self._answering and self._left is not self.cycle:
            self._left = self.cycle
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.flow.resume_writing()
            if self._direct is not None and self._direct.on_disconnect is not None:
                self._direct.on_disconnect()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_timeout_s, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self._client.is_closing():
            return
        if self._head_open:
            self._refuse(request_timeout())
        elif not self._answering:  # the client opened the connection in advance and never used it, as browsers do
            self._client.close()

    def _refuse(self, error: PagemillError) -> None:
        """Answer with the error, unless an answer has begun, and close."""
        if self._may_answer:
            self._write_refusal(error)
        self._notify_disconnect()
        if self._place is not None:
            self._place.become_idle()
        self._client.close()

    def _write_refusal(self, error: PagemillError) -> None:
        begun = self.cycle.scope["state"].get("request_id") if self._answering else None
        identity: str = begun or new_id()
        logger.info("request %s: %d %s before it was read", identity, error.status, error.code)
        body = orjson.dumps(error.body())
        headers = b"".join(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in error.headers().items())
        self.transport.write(
            STATUS_LINE[error.status]
            + headers
            + b"content-type: application/json\r\nconnection: close\r\nx-request-id: %b\r\ncontent-length: %d\r\n\r\n"
            % (identity.encode("ascii"), len(body))
            + body
        )


class _Reading(FlowControl):
    """Reading and writing of a connection, of which reading may be stopped whatever the request needs."""

    _is_stopped = False
    _is_resting = False
    _pauses_after_rest = False

    def rest(self) -> None:
        """Stop reading until `end_rest`, whatever is asked for until then."""
        if not self._is_resting:
            self._is_resting, self._pauses_after_rest = True, self.read_paused
            super().pause_reading()

    def end_rest(self) -> None:
        self._is_resting = False
        if not self._pauses_after_rest:
            super().resume_reading()

    def pause_reading(self) -> None:
        self._pauses_after_rest = True
        super().pause_reading()

    def stop(self) -> None:
        self._is_stopped = True
        self.pause_reading()

    def go_on(self) -> None:
        self._is_stopped = False
        self.resume_reading()

    def resume_reading(self) -> None:
        if self._is_stopped:
            return
        self._pauses_after_rest = False
        if not self._is_resting:
            super().resume_reading()


def headers_too_many() -> PagemillError:
    return PagemillError(
        f"The request has more than {MAX_HEADERS} headers. Send fewer.", status=431, code="headers_too_large"
    )


def heads_over_budget() -> PagemillError:
    return unavailable(
        "The server holds too many bytes of large or unfinished request headers. Send smaller headers, or try again.",
        retry_after_s=1,
        code="headers_over_budget",
    )


def unknown_transfer_coding(codings: bytes) -> PagemillError:
    return PagemillError(
        f"The header Transfer-Encoding is {codings.decode('latin-1')[:80]!r}. Only `chunked`, with HTTP/1.1, is read "
        "here; send a compressed body with the header Content-Encoding.",
        param="transfer-encoding",
        code="unsupported_transfer_encoding",
    )


def _unchunked(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Wrap an app for HTTP/1.0, which has no chunked encoding: an answer of unknown length ends with its connection."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_endless = False

        async def send_plain(message: Message) -> None:
            nonlocal is_endless
            if message["type"] == "http.response.start" and not _has_length(message.get("headers", ())):
                is_endless, cycle.chunked_encoding = True, False
            elif message["type"] == "http.response.body" and is_endless:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer


def _has_length(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-length" for name, _ in headers)
