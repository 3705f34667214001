"""The engine's end of a link: receives a gateway's requests and sends the frames of all their answers.

The frames of one engine step leave in one write, or in a few if they are large. A stream waits while its gateway has
not credited what was sent, and all streams wait while the socket is full; meanwhile their frames stay in their
`Answer`s, which are bounded. The protocol is `pagemill_protocol.link`.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import cast

import msgspec
from starlette.types import Scope

from pagemill_engine.server.answer import Answer
from pagemill_engine.server.context import ServerContext
from pagemill_engine.server.routes.openai_routes import abort, submit
from pagemill_engine.server.routes.responses import encoded
from pagemill_protocol.errors import PagemillError, body_too_large, error_body, internal_error, invalid_field
from pagemill_protocol.frames import FrameError
from pagemill_protocol.link import (
    FREED_HEADER,
    LINK_PATH,
    WINDOW_BYTES,
    Record,
    RecordDecoder,
    RecordKind,
    Refusal,
    decode_number,
    encode_pieces,
    encode_record,
)
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_servers.direct import UpgradedProtocol
from pagemill_servers.guard import require_token
from pagemill_servers.request_middleware import header

logger = logging.getLogger(__name__)

MAX_UNFINISHED_REQUESTS = 1024
"""Most requests of which only some parts have arrived."""
MAX_REQUEST_ID_BYTES = 512
MAX_WRITE_BYTES = 256 * 1024
"""Bytes of one write, and one stream's window more: what waits in the socket's buffer at most, and is not counted."""
MAX_TURN_BYTES = 4 * MAX_WRITE_BYTES
"""Bytes written in one turn of the event loop, so that other work is not delayed."""
_decoder = msgspec.msgpack.Decoder(GenerateRequest)
_encoder = msgspec.msgpack.Encoder()


def decode_request(raw: bytes) -> GenerateRequest:
    """Decode a request. Raises `PagemillError` 400."""
    try:
        request = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PagemillError(f"The body is no GenerateRequest: {error}", code="invalid_request") from None
    if not request.request_id or len(request.request_id) > 256:
        raise invalid_field("request_id", "request_id must have 1 to 256 characters.")
    # This comes before anything is allocated for each choice. Admission checks what depends on the model.
    request.sampling.validate()
    return request


class _Stream:
    """One request and the unsent part of its answer."""

    __slots__ = ("answer", "credit", "is_freed", "number", "request_id", "rest")

    def __init__(self, number: int, request_id: str, answer: Answer) -> None:
        self.number = number
        self.request_id = request_id
        self.answer = answer
        self.credit = WINDOW_BYTES
        """Number of bytes that may be sent."""
        self.rest = memoryview(b"")
        """Unsent bytes of frames that were taken from `answer`."""
        self.is_freed = False
        """Whether the gateway knows that the engine has computed the request."""

    def next_records(self) -> list[bytes]:
        """Return the records that may be sent now. Raises `FrameError` for a frame beyond its bounds."""
        records: list[bytes] = []
        while self.credit > 0:
            if not self.rest:
                self.rest = memoryview(self._next_bytes())
                if not self.rest:
                    break
            data, self.rest = bytes(self.rest[: self.credit]), self.rest[self.credit :]
            self.credit -= len(data)
            records += encode_pieces(RecordKind.DATA, self.number, data)
        if not self.rest and self.answer.is_read:
            records.append(encode_record(RecordKind.END, self.number))
        return records

    def _next_bytes(self) -> bytes:
        answer = self.answer
        if answer.is_within_frame:
            return answer.next_piece() or b""
        return b"".join([encoded(frame) for frame in answer.get_nowait(self.credit)])

    @property
    def is_sent(self) -> bool:
        return not self.rest and self.answer.is_read


class GatewayLink(UpgradedProtocol):
    def __init__(self, context: ServerContext, scope: Scope) -> None:
        """Serve a link. `scope`: the ASGI scope of the request that opened it, with the gateway's token."""
        self._context = context
        self._scope = scope
        self._says_freed = header(scope, FREED_HEADER.encode()) is not None
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._decoder = RecordDecoder()
        self._parts: dict[int, bytearray] = {}
        """Parts of requests, which count in the memory of all requests."""
        self._refused: dict[int, PagemillError] = {}
        """Requests for whose parts there was no memory; the rest of them is dropped."""
        self._request_id = ""
        """Client's request id of the next request, for logs."""
        self._streams: dict[int, _Stream] = {}
        self._changed: dict[_Stream, None] = {}
        """Streams that may have something to send, in order of change."""
        self._may_write = True
        self._is_scheduled = self._is_lost = self._is_closing = False

    def shutdown(self) -> None:
        self._is_closing = True
        self._close_when_done()

    # -- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for record in self._decoder.feed(data):
                self._dispatch(record)
        except FrameError as error:
            logger.warning("a gateway's link cannot be read: %s", error)
            self._transport.abort()

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        self._schedule()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        for number in list(self._parts):
            self._take_parts(number)
        self._refused.clear()
        for number in list(self._streams):
            self._cancel(number)
        self.on_lost()

    def _dispatch(self, record: Record) -> None:
        kind, number, data = record
        if kind == RecordKind.REQUEST:
            refusal = self._refused.pop(number, None)
            parts = self._take_parts(number)
            if refusal is not None:
                self._refuse(number, refusal)
            else:
                self._open(number, parts + data if parts else data)
        elif kind == RecordKind.REQUEST_ID:
            self._request_id = data[:MAX_REQUEST_ID_BYTES].decode(errors="replace")
        elif kind == RecordKind.REQUEST_PART:
            self._keep_part(number, data)
        elif kind == RecordKind.CANCEL:
            self._refused.pop(number, None)
            self._take_parts(number)
            self._cancel(number)
        elif kind == RecordKind.CREDIT:
            stream = self._streams.get(number)
            if stream is not None:
                stream.credit += decode_number(data)
                self._note_change(stream)
        elif kind == RecordKind.ALLOWANCE:
            stream = self._streams.get(number)
            if stream is not None and (client := self._context.client) is not None:
                client.raise_allowance(stream.request_id, decode_number(data))
        else:
            raise FrameError(f"A record has the unknown kind {kind}.")

    def _keep_part(self, number: int, data: bytes) -> None:
        if number in self._refused:
            return
        if number not in self._parts and len(self._parts) + len(self._refused) >= MAX_UNFINISHED_REQUESTS:
            raise FrameError(f"More than {MAX_UNFINISHED_REQUESTS} requests have arrived only in part.")
        parts = self._parts.setdefault(number, bytearray())
        # One byte beyond the limit is enough to refuse the request; the rest is dropped.
        data = data[: self._max_body_bytes + 1 - len(parts)]
        try:
            self._context.memory.take("", len(data))
        except PagemillError as error:
            self._take_parts(number)
            self._refused[number] = error.with_traceback(None)  # a traceback keeps `data` and `parts`
            return
        parts += data

    def _take_parts(self, number: int) -> bytes:
        """Return the parts of a request that have arrived, which count no longer."""
        parts = self._parts.pop(number, None)
        if parts is None:
            return b""
        self._context.memory.release("", len(parts))
        return bytes(parts)

    @property
    def _max_body_bytes(self) -> int:
        return self._context.settings.server.max_body_bytes

    def _open(self, number: int, body: bytes) -> None:
        if number in self._streams:
            raise FrameError(f"Stream {number} is already open.")
        context = self._context
        try:
            if len(body) > self._max_body_bytes:
                raise body_too_large(self._max_body_bytes)
            require_token(self._scope, context.tokens)
            request = decode_request(body)
            answer = submit(context, [request])
            _, ready = context.ready_engine()
        except PagemillError as error:
            self._refuse(number, error)
            return
        except Exception:
            logger.exception("request %s of a gateway failed", self._request_id)
            self._refuse(number, internal_error())
            return
        context.metrics.http_request(LINK_PATH, 200)
        self._transport.write(encode_record(RecordKind.ACCEPTED, number, ready.limits.weights_digest.encode()))
        stream = self._streams[number] = _Stream(number, request.request_id, answer)
        answer.on_change = partial(self._note_change, stream)
        self._note_change(stream)

    def _refuse(self, number: int, error: PagemillError) -> None:
        self._context.metrics.http_request(LINK_PATH, error.status)
        refused = Refusal(error.status, error_body(error), error.headers().get("Retry-After"))
        self._transport.write(encode_record(RecordKind.REFUSED, number, _encoder.encode(refused)))

    def _cancel(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            self._changed.pop(stream, None)
            stream.answer.on_change = None
            stream.answer.close()
            abort(self._context, stream.answer)

    def _note_change(self, stream: _Stream) -> None:
        self._changed[stream] = None
        self._schedule()

    def _schedule(self) -> None:
        """Send at the end of this turn of the event loop, together with the frames of all other requests of the
        step."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._is_scheduled = False
        if self._is_lost or not self._may_write:
            return
        num_bytes = 0
        while self._changed and self._may_write and num_bytes < MAX_TURN_BYTES:
            records: list[bytes] = []
            num_written = num_bytes
            while self._changed and num_bytes - num_written < MAX_WRITE_BYTES:
                added = self._next_records(next(iter(self._changed)))
                records += added
                num_bytes += sum(map(len, added))
            if records:
                self._transport.write(b"".join(records))
        if self._changed and self._may_write:
            self._schedule()
        self._close_when_done()

    def _next_records(self, stream: _Stream) -> list[bytes]:
        del self._changed[stream]
        try:
            records = stream.next_records()
        except FrameError:
            logger.exception("a frame cannot be sent")
            self._cancel(stream.number)
            return [encode_record(RecordKind.END, stream.number)]
        if stream.is_sent:
            self._streams.pop(stream.number, None)
        elif self._says_freed and stream.answer.ended and not stream.is_freed:
            stream.is_freed = True
            records.append(encode_record(RecordKind.FREED, stream.number))
        return records

    def _close_when_done(self) -> None:
        if self._is_closing and not self._streams and not self._is_lost:
            self._transport.close()
