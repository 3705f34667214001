"""Where the payloads of one engine answer go: straight to the client, or into one body.

A sink knows whether the client has seen anything of this answer (`delivered`), which is what decides about a retry.
Payloads are not parsed; streamed ones are only checked to be whole events, since half an event would corrupt the
client's stream. The payload of the last frame comes apart (`closing`): it holds nothing but usage and `[DONE]` when
streaming, so that an answer which is part of a larger one can leave it out, and the whole body otherwise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from pagemill_gateway.relay.attempt_failures import UpstreamFailure
from pagemill_protocol.dialects.transport import SSE, Transport

Write = Callable[[bytes], Awaitable[None]]


class Direct(Protocol):
    """A client that can be written to without waiting."""

    def write_now(self, data: bytes) -> bool:
        """Whole events; `False`, and nothing was done, unless it has got the beginning of the stream and takes what it
        is sent."""
        ...

    def hold(self) -> None:
        """What is written next is sent together with what follows in this turn of the event loop."""
        ...


class Sink(Protocol):
    @property
    def delivered(self) -> bool:
        """Whether the client saw a byte of this answer."""
        ...

    @property
    def comment(self) -> Write | None:
        """Writes what is no part of the answer; None where there is no place for such."""
        ...

    async def take(self, payloads: list[bytes], closing: bytes | None) -> None:
        """Non-empty payloads in order, and that of the last frame once it is there.

        Raises `UpstreamFailure` when they are not what a client can be given.
        """
        ...

    def take_now(self, payloads: list[bytes]) -> bool:
        """As `take`, without waiting, and at least one; `False`, and nothing was done, while the client must be waited
        for."""
        ...


class StreamSink:
    """Writes events to the client as they come."""

    def __init__(
        self, write: Write, transport: Transport = SSE, *, closes: bool = True, direct: Direct | None = None
    ) -> None:
        """`closes`: the closing payload too. `direct`: the same client, where a plain stream needs no `write`."""
        self._write = write
        self._direct = direct
        self._is_whole = transport.is_whole
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
                if not self._is_whole(event):
                    raise _incomplete()
            self._delivered = True
            if closing and self._direct is not None:
                self._direct.hold()  # the end of the response follows
            await self._write(events[0] if len(events) == 1 else b"".join(events))

    def take_now(self, payloads: list[bytes]) -> bool:
        if self._direct is None:
            return False
        for event in payloads:
            if not self._is_whole(event):
                raise _incomplete()
        is_taken = self._direct.write_now(payloads[0] if len(payloads) == 1 else b"".join(payloads))
        self._delivered = self._delivered or is_taken
        return is_taken


def _incomplete() -> UpstreamFailure:
    return UpstreamFailure("broken", "The engine sent an incomplete event.")


class BodySink:
    """Keeps the whole body; the client sees nothing of it until the caller sends it."""

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

    def take_now(self, payloads: list[bytes]) -> bool:
        """The body is the closing payload."""
        return True
