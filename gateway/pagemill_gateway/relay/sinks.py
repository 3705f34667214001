"""Where the payloads of one engine answer go: straight to the client, or into one body.

A sink knows whether the client has seen anything of this answer (`delivered`), which is what decides about a retry.
Payloads are not parsed; a streamed one is only checked to be whole SSE events, since half an event would corrupt the
client's stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from pagemill_gateway.relay.upstream import UpstreamFailure

Write = Callable[[bytes], Awaitable[None]]


class Sink(Protocol):
    @property
    def delivered(self) -> bool:
        """Whether the client saw a byte of this answer."""
        ...

    def restart(self) -> None:
        """Another attempt begins; forget what the one before brought."""
        ...

    async def take(self, payloads: list[bytes]) -> None:
        """Non-empty payloads in order. Raises `UpstreamFailure` when they are not what a client can be given."""
        ...


class StreamSink:
    """Writes events to the client as they come."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._delivered = False

    @property
    def delivered(self) -> bool:
        return self._delivered

    def restart(self) -> None:
        pass

    async def take(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            if not (payload.startswith((b"data:", b":")) and payload.endswith(b"\n\n")):
                raise UpstreamFailure("broken", "The engine sent an incomplete event.")
        self._delivered = True
        await self._write(payloads[0] if len(payloads) == 1 else b"".join(payloads))


class BodySink:
    """Keeps the whole body, which the engine sends with its last frame."""

    delivered = False

    def __init__(self) -> None:
        self.body = b""

    def restart(self) -> None:
        self.body = b""

    async def take(self, payloads: list[bytes]) -> None:
        self.body += b"".join(payloads)
