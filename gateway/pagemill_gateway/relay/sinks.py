"""Sinks for the payloads of one engine answer: the client's stream, or one body.

A sink knows whether the client has got anything of the answer (`delivered`), which decides about restarts. Payloads are
not parsed; streamed ones are only checked to be whole events. The payload of the last frame is passed separately
(`closing`). In a stream it has only usage and `[DONE]`, so that an answer that is part of a larger one can leave it
out; otherwise it is the whole body. Its end is kept until `finish`, so that a client that knows the end of its answer
occupies nothing any more.
"""

from __future__ import annotations

from typing import Protocol

from pagemill_api.dialects.transport import SSE, Transport
from pagemill_gateway.relay.keep_alive import Event, Write
from pagemill_protocol.frames import PartMeta
from pagemill_routing.attempts.attempt_failures import UpstreamFailure


class Direct(Protocol):
    """A client that can be written to without waiting."""

    def write_now(self, data: bytes) -> bool:
        """Write whole events. Return false and do nothing unless the stream has begun and the client is fast enough."""
        ...

    def cork(self) -> None:
        """Send what is written from now on in one write, together with the rest of this turn of the event loop."""
        ...


class PartWriter(Protocol):
    """A client that can be sent a large payload in parts, before all of it has arrived."""

    def hold(self, num_bytes: int) -> None:
        """Count bytes of an answer that must be kept until it is complete. Raises `PagemillError` 429 or 503."""
        ...

    def release(self, num_bytes: int) -> None:
        """Count bytes that are kept no longer."""
        ...

    def passes(self, num_bytes: int) -> bool:
        """Whether a payload of this many bytes may be sent in parts."""
        ...

    async def write_part(self, data: bytes, meta: PartMeta) -> None: ...


class Sink(Protocol):
    @property
    def delivered(self) -> bool:
        """Whether the client has got a byte of this answer."""
        ...

    @property
    def is_within(self) -> bool:
        """Whether the client has got only a part of a payload, which no other engine can continue."""
        ...

    @property
    def write_waiting(self) -> Write | None:
        """The function that writes events to the client while the request waits; None if nothing is streamed."""
        ...

    @property
    def waiting(self) -> Event | None:
        """Makes these events (`Transport.waiting`)."""
        ...

    async def take(self, payloads: list[bytes], closing: bytes | None) -> None:
        """Take non-empty payloads in order, and that of the last frame or None.

        Raises `UpstreamFailure` for payloads that must not be sent to a client.
        """
        ...

    def take_nowait(self, payloads: list[bytes]) -> bool:
        """Take at least one payload like `take`, without waiting. Return false and do nothing if the client is slow."""
        ...

    async def take_part(self, data: bytes, meta: PartMeta) -> None:
        """Take the next part of a large payload. Raises like `take`, and `PagemillError` beyond the limits."""
        ...

    def begin(self) -> None:
        """Forget the parts of a payload that will not be completed, because another attempt begins."""
        ...


class _Parts:
    """The parts of a large payload that must be whole before it can be used."""

    def __init__(self, client: PartWriter | None) -> None:
        self._client = client
        self._pieces: list[bytes] = []

    def add(self, data: bytes, meta: PartMeta) -> bytes | None:
        """Keep a part. Return the payload if it is complete, otherwise `None`."""
        if self._client is not None:
            self._client.hold(len(data))
        self._pieces.append(data)
        if not meta.is_end:
            return None
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def release(self, payload: bytes) -> None:
        """Count a complete payload no longer, because the client has it."""
        if self._client is not None:
            self._client.release(len(payload))

    def begin(self) -> None:
        if self._client is not None:
            self._client.release(sum(map(len, self._pieces)))
        self._pieces = []


class StreamSink:
    """Writes events to the client as they arrive."""

    def __init__(
        self,
        write: Write,
        transport: Transport = SSE,
        *,
        closes: bool = True,
        direct: Direct | None = None,
        client: PartWriter | None = None,
        passes: bool = False,
    ) -> None:
        """`closes`: whether to write the closing payload. `direct` is the same client, for writes without waiting, and
        `client` for counting parts; `passes`: whether it may get them before the payload is complete."""
        self._write = write
        self._direct = direct
        self._client = client
        self._passes = passes
        self._is_complete = transport.is_complete
        self.waiting = transport.waiting
        self._closes = closes
        self._delivered = False
        self._parts = _Parts(client)
        self._ends = b"", b""
        """The beginning and the end of the payload that is passed on in parts."""
        self._end = b""
        self._last_part: tuple[bytes, PartMeta] | None = None
        """The end of a closing payload that is passed on in parts."""
        self.is_within = False

    @property
    def delivered(self) -> bool:
        return self._delivered

    @property
    def write_waiting(self) -> Write | None:
        return self._write

    async def take(self, payloads: list[bytes], closing: bytes | None) -> None:
        events = [*payloads, closing] if closing and self._closes else payloads
        for event in events:
            if not self._is_complete(event):
                raise _incomplete()
        if not events:
            return
        data = events[0] if len(events) == 1 else b"".join(events)
        if closing and self._closes:
            self._end = data
        else:
            self._delivered = True
            await self._write(data)

    async def finish(self) -> None:
        """Write the end of a complete answer."""
        if self._end:
            if self._direct is not None:
                self._direct.cork()  # the end of the response follows
            await self._write(self._end)
        if self._last_part is not None:
            assert self._client is not None
            await self._client.write_part(*self._last_part)

    def take_nowait(self, payloads: list[bytes]) -> bool:
        if self._direct is None:
            return False
        for event in payloads:
            if not self._is_complete(event):
                raise _incomplete()
        is_taken = self._direct.write_now(payloads[0] if len(payloads) == 1 else b"".join(payloads))
        self._delivered = self._delivered or is_taken
        return is_taken

    async def take_part(self, data: bytes, meta: PartMeta) -> None:
        if meta.closes and not self._closes:
            return
        if self._client is None or not self._passes or not self._client.passes(meta.num_payload_bytes):
            event = self._parts.add(data, meta)
            if event is not None:
                await self.take(*(([], event) if meta.closes else ([event], None)))
                self._parts.release(event)
            return
        self._ends = (self._ends[0] + data)[:16], (self._ends[1] + data)[-16:]
        if meta.is_end and not self._is_complete(b"".join(self._ends)):
            raise _incomplete()
        self._delivered, self.is_within = True, not meta.is_end
        if meta.is_end:
            self._ends = b"", b""
        if meta.closes and meta.is_end:
            self._last_part = data, meta
        else:
            await self._client.write_part(data, meta)

    def begin(self) -> None:
        self._parts.begin()


def _incomplete() -> UpstreamFailure:
    return UpstreamFailure("broken", "The engine sent an incomplete event.")


class BodySink:
    """Keeps the body, which the caller sends to the client; a large one is passed on in parts if the client permits."""

    write_waiting = waiting = None

    def __init__(self, client: PartWriter | None = None, *, passes: bool = False) -> None:
        """`passes`: whether the body is the client's, so that a large one may be sent in parts."""
        self.body: bytes | None = None
        """The body; `None` if the client has got it."""
        self.delivered = self.is_within = False
        self._client = client
        self._passes = passes
        self._parts = _Parts(client)
        self._last_part: tuple[bytes, PartMeta] | None = None

    async def take(self, payloads: list[bytes], closing: bytes | None) -> None:
        if closing is None:
            return
        if self._client is not None and not self._passes:
            # One of several bodies waits for the others. A single small one is sent at once.
            self._client.hold(len(closing))
        self._keep(closing)

    def take_nowait(self, payloads: list[bytes]) -> bool:
        """Ignore payloads, because the body is the closing one."""
        return True

    async def take_part(self, data: bytes, meta: PartMeta) -> None:
        if not meta.closes:
            return
        if self._client is None or not self._passes or not self._client.passes(meta.num_payload_bytes):
            body = self._parts.add(data, meta)
            if body is not None:
                self._keep(body)
            return
        if meta.is_first:
            _check_json(data)
        self.delivered = self.is_within = True
        if meta.is_end:
            self._last_part = data, meta
        else:
            await self._client.write_part(data, meta)

    async def finish(self) -> None:
        """Write the end of a complete body that was passed on in parts."""
        if self._last_part is not None:
            assert self._client is not None
            await self._client.write_part(*self._last_part)

    def begin(self) -> None:
        self._parts.begin()

    def clear(self) -> None:
        """Drop the body and its parts, because the answer has failed."""
        self._parts.begin()
        self.body = None

    def _keep(self, body: bytes) -> None:
        _check_json(body)
        self.body = body


def _check_json(body: bytes) -> None:
    if not body.startswith((b"{", b"[")):
        raise UpstreamFailure("broken", "The engine sent something else than a JSON body.")
