"""The TLS handshakes of one port: each is counted among the port's connections before anything is spent on it.

A server that leaves handshakes to asyncio learns of a connection when its handshake is done, while each unfinished one
holds some 60 KB. Here a connection takes its place when it is accepted. Unfinished handshakes are limited in time and
number; beyond the number, the oldest one ends, as an honest one takes milliseconds. `connection` serves what follows,
`certificates` has the certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any, cast

from pagemill_protocol.errors import PagemillError
from pagemill_servers.connection_limits import ConnectionLimits, Place, unmapped

MAX_UNFINISHED = 1000
HANDSHAKE_TIMEOUT_S = 15.0


def secured(
    protocol: type[asyncio.Protocol], certificate: ssl.SSLContext | None, limits: ConnectionLimits
) -> type[asyncio.Protocol]:
    """Return what makes the protocols of a port in place of `protocol`, which it is itself without a certificate."""
    if certificate is None:
        return protocol
    handshakes = _Handshakes(certificate, limits)

    def make(*arguments: Any, **options: Any) -> asyncio.Protocol:
        return _Handshake(handshakes, protocol(*arguments, **options))

    return cast(type[asyncio.Protocol], make)


class _Handshakes:
    """The unfinished handshakes of a port."""

    def __init__(self, certificate: ssl.SSLContext, limits: ConnectionLimits) -> None:
        self._unfinished: dict[_Handshake, None] = {}
        self.certificate = certificate
        self.limits = limits

    def begin(self, handshake: _Handshake) -> None:
        while len(self._unfinished) >= MAX_UNFINISHED:
            oldest = next(iter(self._unfinished))
            self.end(oldest)
            oldest.abort()
        self._unfinished[handshake] = None

    def end(self, handshake: _Handshake) -> None:
        self._unfinished.pop(handshake, None)


class _Handshake(asyncio.Protocol):
    """Receives a connection's events until its handshake is done; `app` receives those that follow."""

    def __init__(self, handshakes: _Handshakes, app: asyncio.Protocol) -> None:
        self._handshakes = handshakes
        self._app = app
        self._loop = asyncio.get_running_loop()
        self._place: Place | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._received: list[bytes] = []
        """What arrived behind the handshake."""
        self._is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        address = transport.get_extra_info("peername")
        try:
            self._place = self._handshakes.limits.open(
                unmapped(address[0]) if isinstance(address, tuple) else None, self.abort
            )
        except PagemillError:
            transport.abort()
        else:
            self._timer = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self.abort)

    def data_received(self, data: bytes) -> None:
        if self._task is not None:
            self._received.append(data)
            return
        self._transport.pause_reading()
        self._stop_timer()
        self._handshakes.begin(self)
        # `start_tls` expects that nothing has been read, which no protocol can ensure on uvloop. It schedules two
        # calls, which connect its protocol and resume reading; one that is scheduled right behind them hands over the
        # first bytes before any others are read.
        self._task = self._loop.create_task(self._secure())
        self._loop.call_soon(self._loop.call_soon, self._hand_over, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._stop_timer()
        if self._task is None:
            self._release()

    def abort(self) -> None:
        self._transport.abort()

    def _hand_over(self, data: bytes) -> None:
        protocol: Any = self._transport.get_protocol()  # an `asyncio.BufferedProtocol`
        while data and not self._transport.is_closing():
            buffer = memoryview(protocol.get_buffer(len(data)))
            num_bytes = min(len(data), len(buffer))
            buffer[:num_bytes] = data[:num_bytes]
            protocol.buffer_updated(num_bytes)
            data = data[num_bytes:]

    async def _secure(self) -> None:
        secured = None
        with contextlib.suppress(OSError):  # of `ssl` and of the time limit, too: the client failed, or left
            secured = await self._loop.start_tls(
                self._transport,
                self,
                self._handshakes.certificate,
                server_side=True,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
            )
        self._handshakes.end(self)
        self._release()  # `app` takes a place at once
        if secured is None or self._is_lost or secured.is_closing():
            self._transport.abort()
            return
        secured.set_protocol(self._app)
        self._app.connection_made(secured)
        if self._received:
            self._app.data_received(b"".join(self._received))

    def _release(self) -> None:
        if self._place is not None:
            self._place.release()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
