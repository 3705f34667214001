"""Streamed requests over HTTP/1.1 with exact arrival times, at little cost: events are read after the answer.

While an answer is streamed, only its parts and their times are kept.

`pagemill.client` is the client for people. Here, what a measurement costs adds to what it measures. Server-sent events:
WHATWG HTML, section 9.2.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools
import msgspec

CONNECT_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 256 * 1024 * 1024
MOST_OF_AN_ERROR = 300
NULL = msgspec.Raw(b"null")


class TokenUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"")


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: TokenUsage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


class _Error(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error


class StreamedAnswer(NamedTuple):
    """An answer that is complete, or `error`."""

    text: str = ""
    arrivals_s: Sequence[float] = ()
    """When each event with text or the end came, by `time.perf_counter`."""
    usage: TokenUsage = TokenUsage()
    error: str = ""


class Exchanges:
    """A pool of connections to one server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        bearer = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {parts.path}/v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n{bearer}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: "
        ).encode()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def ask(self, body: bytes) -> StreamedAnswer:
        """Send a request and return its answer; a failure is an answer with `error`."""
        try:
            connection = await self._connection()
            await connection.exchange(b"%s%d\r\n\r\n%s" % (self._head, len(body), body))
        except (OSError, TimeoutError) as error:
            return StreamedAnswer(error=f"The connection broke: {str(error) or type(error).__name__}")
        except httptools.HttpParserError as error:
            return StreamedAnswer(error=f"The server's answer is not HTTP: {error}")
        if connection.reusable:
            self._idle.append(connection)
        else:
            self._close(connection)
        return connection.answer()

    def close(self) -> None:
        for connection in list(self._open):
            self._close(connection)

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
            self._close(connection)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        self._open.add(connection)
        return connection

    def _close(self, connection: _Connection) -> None:
        self._open.discard(connection)
        connection.abort()


class _Connection(asyncio.Protocol):
    """Keeps the parts of one answer after the other, with the time at which each came."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._is_open_ended = True
        """Whether the answer ends with its connection."""
        self._encoding = b""
        self._parts: list[bytes] = []
        self._at_s: list[float] = []
        self._num_bytes = 0
        self._now_s = 0.0
        self.reusable = False

    async def exchange(self, request: bytes) -> None:
        assert self._transport is not None
        self._begin()
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        except asyncio.CancelledError:
            self._transport.abort()
            raise

    def answer(self) -> StreamedAnswer:
        if self._encoding not in (b"", b"identity"):
            name = self._encoding.decode(errors="replace")
            return StreamedAnswer(
                error=f"The server's answer is compressed ({name}), and no compression was asked for."
            )
        status = self._parser.get_status_code()
        if status != 200:
            return StreamedAnswer(error=_refused(status, b"".join(self._parts)))
        return read_events(self._parts, self._at_s)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- called by the event loop --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        self._num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(error)
        if self._num_bytes > MAX_ANSWER_BYTES:
            self._end(ConnectionError(f"the answer has more than {MAX_ANSWER_BYTES} bytes"))

    def eof_received(self) -> None:
        self.reusable = False
        if self._is_open_ended and self._at_s:
            self._end(None)  # whether the answer is complete, its last event says
        self._end(ConnectionError("the server closed the connection before the answer was complete"))

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._end(error or ConnectionError("the server closed the connection before the answer was complete"))

    # -- called by the parser ------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"transfer-encoding" | b"content-length":
                self._is_open_ended = False
            case b"content-encoding":
                self._encoding = value.strip().lower()

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)
        self._at_s.append(self._now_s)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self.reusable = False
            self._ended.set_exception(error)


_decoder = msgspec.json.Decoder(_Event)
_decoder_of_all = msgspec.json.Decoder(list[_Event])


def read_events(parts: Sequence[bytes], at_s: Sequence[float]) -> StreamedAnswer:
    """Return the answer of a stream's bytes. An event came with the part that has the end of its line."""
    found: list[bytes] = []
    came_with: list[int] = []
    rest, is_done = b"", False
    for number, part in enumerate(parts):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # comments keep the connection alive; blank lines end events
            data = line[5:].strip()
            if data == b"[DONE]":
                is_done = True
            else:
                found.append(data)
                came_with.append(number)
    try:
        events = _decoded(found)
    except _UnreadableEvent as error:
        return StreamedAnswer(error=str(error))
    return _answer(events, came_with, at_s, is_done)


def _answer(events: Sequence[_Event], came_with: Sequence[int], at_s: Sequence[float], is_done: bool) -> StreamedAnswer:
    texts: list[str] = []
    arrivals: dict[int, float] = {}
    usage = TokenUsage()
    for event, number in zip(events, came_with, strict=True):
        if event.error and event.error != NULL:
            return StreamedAnswer(error=_refused(0, b'{"error": %s}' % bytes(event.error)))
        usage = event.usage or usage
        for choice in event.choices[:1]:
            delta = choice.delta
            text = delta.content or ""
            texts.append(text)
            if text or delta.reasoning_content or delta.reasoning or delta.tool_calls or choice.finish_reason:
                arrivals[number] = at_s[number]  # what comes in one part is one arrival
    if not is_done:
        return StreamedAnswer(error="The server ended the stream before the answer was complete.")
    if not arrivals:
        return StreamedAnswer(error="The server ended the answer without any text.")
    return StreamedAnswer("".join(texts), [*arrivals.values()], usage)


class _UnreadableEvent(Exception):
    pass


def _decoded(found: Sequence[bytes]) -> list[_Event]:
    """Return the events: all at once, which takes half as long as one by one, where each is valid."""
    try:
        events = _decoder_of_all.decode(b"[%s]" % b",".join(found))
        if len(events) == len(found):
            return events
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    events = []
    for data in found:
        try:
            events.append(_decoder.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _UnreadableEvent(f"The server sent an event that cannot be read ({error}): {data[:80]!r}") from None
    return events


def _refused(status: int, body: bytes) -> str:
    try:
        message = msgspec.json.decode(body, type=_Refusal).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = body.decode(errors="replace").strip()[:MOST_OF_AN_ERROR] or "no explanation"
    if status == 401:
        message += " Pass the API key with --api-key or in PAGEMILL_API_KEY."
    return f"The server refused ({status}): {message}" if status else f"The server failed: {message}"
