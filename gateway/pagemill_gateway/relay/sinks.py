"""Sinks for the payloads of one engine answer: the client's stream, or one body.

A sink knows whether the client has got anything of the answer (`delivered`), which decides about restarts. Payloads are
not parsed; streamed ones are only checked to be whole events. The payload of the last frame is passed separately
(`closing`). In a stream it has only usage and `[DONE]`, so that an answer that is part of a larger one can leave it
out; otherwise it is the whole body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from pagemill_api.dialects.transport import SSE, Transport
from pagemill_gateway.relay.attempt_failures import UpstreamFailure

Write = Callable[[bytes], Awaitable[None]]


class Direct(Protocol):
    """A client that can be written to without waiting."""

    def write_now(self, data: bytes) -> bool:
        """Write whole events. Return false and do nothing unless the stream has begun and the client is fast enough."""
        ...

    def cork(self) -> None:
        """Send what is written from now on in one write, together with the rest of this turn of the event loop."""
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

    def take_nowait(self, payloads: list[bytes]) -> bool:
        """Take at least one payload like `take`, without waiting. Return false and do nothing if the client is slow."""
        ...


class StreamSink:
    """Writes events to the client as they arrive."""

    def __init__(
        self, write: Write, transport: Transport = SSE, *, closes: bool = True, direct: Direct | None = None
    ) -> None:
        """`closes`: whether to write the closing payload. `direct` is the same client, for writes without waiting."""
        self._write = write
        self._direct = direct
        self._is_complete = transport.is_complete
        self._has_comments = transport.has_comments
        self._closes = closes
        self._delivered = False

    @property
    def delivered(self) -> bool:
        return self._delivered

    @property
    def comment(self) -> Write | None:
        return self._write if self._has_comments else None

    async def take(self, payloads: list[bytes], closing: bytes | None) -> None:
        events = [*payloads, closing] if closing and self._closes else payloads
        if events:
            for event in events:
                if not self._is_complete(event):
                    raise _incomplete()
            self._delivered = True
            if closing and self._direct is not None:
                self._direct.cork()  # the end of the response follows
            await self._write(events[0] if len(events) == 1 else b"".join(events))

    def take_nowait(self, payloads: list[bytes]) -> bool:
        if self._direct is None:
            return False
        for event in payloads:
            if not self._is_complete(event):
                raise _incomplete()
        is_taken = self._direct.write_now(payloads[0] if len(payloads) == 1 else b"".join(payloads))
        self._delivered = self._delivered or is_taken
        return is_taken


def _incomplete() -> UpstreamFailure:
    return UpstreamFailure("broken", "The engine sent an incomplete event.")


class BodySink:
    """Keeps the whole body, which the caller sends to the client."""

    delivered = False
    comment = None

    def __init__(self) -> None:
        self.body = b""

    async def take(self, payloads: list[bytes], closing: bytes | None) -> None:
        if closing is None:
            return
        if not closing.startswith((b"{", b"[")):
            raise UpstreamFailure("broken", "The engine sent something else than a JSON body.")
        self.body = closing

    def take_nowait(self, payloads: list[bytes]) -> bool:
        """Ignore payloads, because the body is the closing one."""
        return True
