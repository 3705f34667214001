"""Bounds on what happens before ASGI, invisible to `request_middleware`, such as headers that never end.

`bounded_protocol(...)` makes the `http=` class of a `uvicorn.Config`. Request heads above a size or time get 431 or 408
and the connection closes; a silent connection is closed; trailers are dropped; a malformed request gets a 400 in
OpenAI's shape, also if its body's framing breaks before the answer has begun. When a connection ends, the request being
answered is notified even if others were pipelined behind it. Offers of other protocols (WebSocket, h2c) are ignored, as
HTTP allows, except those of `upgrades`, for which an app may take over the connection (`direct`); HTTP/1.0 clients get
no chunked encoding. Requests refused here get an id and a log line, since no app sees them.

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
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from pagemill_protocol.errors import PagemillError, headers_too_large, request_timeout
from pagemill_protocol.ids import new_id
from pagemill_servers.direct import RESPONSE_EXTENSION, UPGRADE_EXTENSION, DirectResponse, UpgradedProtocol

logger = logging.getLogger(__name__)


def bounded_protocol(
    max_header_bytes: int = 64 * 1024, header_timeout_s: float = 15.0, upgrades: Collection[str] = ()
) -> type[asyncio.Protocol]:
    """Return a uvicorn HTTP protocol class with these bounds on the head of each request.

    `upgrades`: protocols for which the app may take over a connection.
    """
    bounds = {"max_header_bytes": max_header_bytes, "header_timeout_s": header_timeout_s}
    return type("BoundedProtocol", (_BoundedProtocol,), {**bounds, "upgrades": frozenset(upgrades)})


class _BoundedProtocol(HttpToolsProtocol):
    max_header_bytes: int
    header_timeout_s: float
    upgrades: frozenset[str]

    _head_timer: asyncio.TimerHandle | None = None
    _head_open = False
    _unparsed_bytes = 0
    """Bytes received since the parser last made progress: a growing head or trailer, or chunk extensions."""
    _current: RequestResponseCycle | None = None
    """The request that is being answered; uvicorn's `cycle` is the last one received."""

    _direct: DirectResponse | None = None
    """The response to `_current`."""
    _upgrade = ""
    """The protocol offered by the latest head."""
    _next_upgrade = ""
    """The protocol offered by a head that is parsed again without the offer."""

    _refusal: PagemillError | None = None
    """The refusal of data behind the requests that are still being answered; it is sent after their answers."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._notify_disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unparsed_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(PagemillError("The request is not valid HTTP.", code="invalid_http"))
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._unparsed_bytes > self.max_header_bytes:
            self._refuse(headers_too_large(self.max_header_bytes))
        elif not self._answering:  # line breaks between requests ended the wait for the next one and begin none
            self._start_head_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_open = True
        self._upgrade, self._next_upgrade = self._next_upgrade, ""
        self._start_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_open:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self._head_open = False
        self._unparsed_bytes = 0
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._direct is not None:
            self._direct.uncork()
        if self._current is not None:
            # The extensions refer to the request: without this, only the garbage collector would free the cycle.
            self._current.scope["extensions"] = {}
        refusal = None if self.pipeline else self._refusal
        super().on_response_complete()
        if refusal is not None and not self.transport.is_closing():
            self._refuse(refusal)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._current, self._direct = cycle, DirectResponse(cycle)
        extensions: dict[str, object] = {RESPONSE_EXTENSION: self._direct}
        if self._upgrade in self.upgrades and cycle is self.cycle:
            extensions[UPGRADE_EXTENSION] = partial(self._take_over, self._upgrade)
        scope: Any = cycle.scope
        scope["extensions"] = extensions
        answering: Any = _unchunked(cycle, app) if cycle.scope["http_version"] == "1.0" else app
        super()._start_asgi_task(cycle, answering)

    def _parse(self, data: bytes) -> None:
        """Parse data; a request that offers another protocol is parsed again without the offer.

        httptools attributes all bytes after such a head to that protocol: it would drop the body, or read it as a
        request.
        """
        rest: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                rest = memoryview(rest)[offer.args[0] :]
                head = self._head_without_upgrade()
                self._next_upgrade = next(
                    (value.decode("latin-1") for name, value in self.headers if name == b"upgrade"), ""
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

    def _take_over(self, name: str, successor: UpgradedProtocol) -> None:
        """Answer 101 and hand the connection over to `successor`."""
        cycle = self.cycle
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        self._stop_head_timer()
        self.connections.discard(self)
        self.connections.add(successor)  # type: ignore[arg-type]
        successor.on_lost = partial(self.connections.discard, successor)
        self.transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %b\r\n\r\n" % name.encode("latin-1")
        )
        self.transport.set_protocol(successor)
        successor.connection_made(self.transport)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _may_answer(self) -> bool:
        """Whether a refusal may be written now: no answer to an earlier request is due."""
        if not self._answering:
            return True
        return self.cycle is self._current and self.cycle.more_body and not self.cycle.response_started

    def _notify_disconnect(self) -> None:
        """Notify the request being answered that the client is gone."""
        if self._current is not None and not self._current.response_complete:
            self._current.disconnected = True
            self._current.message_event.set()
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
        if self.transport.is_closing():
            return
        if self._answering:  # the head of a pipelined request, which is not answered yet
            self._start_head_timer()
        elif self._head_open:
            self._refuse(request_timeout())
        else:  # the client opened the connection in advance and never used it, as browsers do
            self.transport.close()

    def _refuse(self, error: PagemillError) -> None:
        """Answer with the error and close, after the answers to earlier requests.

        The connection is only closed where one of those has a broken body.
        """
        if self._answering and not self.cycle.more_body:
            self._refusal = error
            return
        if self._may_answer:
            self._write_refusal(error)
        self.transport.close()

    def _write_refusal(self, error: PagemillError) -> None:
        begun = self.cycle.scope["state"].get("request_id") if self._answering else None
        identity: str = begun or new_id()
        logger.info("request %s: %d %s before it was read", identity, error.status, error.code)
        self._notify_disconnect()
        body = orjson.dumps(error.body())
        self.transport.write(
            STATUS_LINE[error.status]
            + b"content-type: application/json\r\nconnection: close\r\nx-request-id: %b\r\ncontent-length: %d\r\n\r\n"
            % (identity.encode("ascii"), len(body))
            + body
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
