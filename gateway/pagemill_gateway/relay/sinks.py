"""Sinks for the payloads of one engine answer: the client's stream, or one body.

A sink knows whether the client has got anything of the answer (`delivered`), which decides about restarts. Payloads are
not parsed; streamed ones are only checked to be whole events. The payload of the last frame is passed separately
(`closing`). In a stream it has only usage and `[DONE]`, so that an answer that is part of a larger one can leave it
out; otherwise it is the whole body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from pagemill_gateway.relay.attempt_failures import UpstreamFailure
from pagemill_protocol.dialects.transport import SSE, Transport

Write = Callable[[bytes], Awaitable[None]]


class Direct(Protocol):
    """A client that can be written to without waiting."""

    @property
    def may_write(self) -> bool:
        """Whether the stream has begun and the client reads fast enough."""
        ...

    def write(self, data: bytes) -> None:
        """Write whole events. Call it only while `may_write`."""
        ...


class Sink(Protocol):
    @property
    def delivered(self) -> bool:
        """Whether the client has got a byte of this answer."""
        ...

    @property
    def comment(self) -> Write | None:
        """The function that writes comments to the client; None if the format has no comments."""
        ...

    async def take(self, payloads: list[bytes], closing: bytes | None) -> None:
        """Take non-empty payloads in order, and that of the last frame or None.

        Raises `UpstreamFailure` for payloads that must not be sent to a client.
        """
        ...

    @property
    def takes_now(self) -> bool:
        """Whether `take_now` may be called."""
        ...

    def take_now(self, payloads: list[bytes]) -> None:
        """Take payloads like `take`, without waiting."""
        ...


class StreamSink:
    """Writes events to the client as they arrive."""

    def __init__(
        self, write: Write, transport: Transport = SSE, *, closes: bool = True, direct: Direct | None = None
    ) -> None:
        """`closes`: whether to write the closing payload. `direct` is the same client, for writes without waiting."""
        self._write = write
        self._direct = direct
        self._transport = transport
        self._closes = closes
        self._delivered = False

    @property
    def delivered(self) -> bool:
        return self._delivered

    @property
    def comment(self) -> Write | None:
        return self._write if self._transport.has_comments else None

    async def take(self, payloads: list[bytes], closing: bytes | None) -> None:
        events = [*payloads, closing] if closing and self._closes else payloads
        if events:
            for event in events:
                if not self._transport.is_whole(event):
                    raise _incomplete()
            self._delivered = True
            await self._write(events[0] if len(events) == 1 else b"".join(events))

    @property
    def takes_now(self) -> bool:
        return self._direct is not None and self._direct.may_write

    def take_now(self, payloads: list[bytes]) -> None:
        assert self._direct is not None
        for event in payloads:
            if not self._transport.is_whole(event):
                raise _incomplete()
        self._delivered = True
        self._direct.write(payloads[0] if len(payloads) == 1 else b"".join(payloads))


def _incomplete() -> UpstreamFailure:
    return UpstreamFailure("broken", "The engine sent an incomplete event.")


class BodySink:
    """Keeps the whole body, which the caller sends to the client."""

    delivered = False
    comment = None
    takes_now = True

    def __init__(self) -> None:
        self.body = b""

    async def take(self, payloads: list[bytes], closing: bytes | None) -> None:
        if closing is None:
            return
        if not closing.startswith((b"{", b"[")):
            raise UpstreamFailure("broken", "The engine sent something else than a JSON body.")
        self.body = closing

    def take_now(self, payloads: list[bytes]) -> None:
        """Ignore payloads, because the body is the closing one."""
