"""The sockets of all state streams, read together: what came within one interval is applied in one turn of the loop.

A frame that wakes the event loop alone takes three times the CPU of one that follows another, since the code for it has
left the processor's caches. So the loop watches one epoll of all sockets in place of each socket: frames of an idle
fleet are read as they come, and those of a busy one once an interval. Without frames there is no timer. What the bytes
mean is the protocols' (`state_connection`); streams over TLS are the event loop's own.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from collections.abc import Callable

from pagemill_gateway.engine_http.connecting import Connection, Connector, Origin

INTERVAL_S = 0.01
"""Between two reads of all. Frames come 50 ms apart from each engine, so a report is at most a fifth older."""
SPARSE_S = INTERVAL_S / 4
"""Frames of an idle fleet are read as they come, unless they follow each other faster than this."""
READ_BYTES = 64 * 1024
SNAPSHOT_READ_BYTES = 256 * 1024
"""Of a socket that has more than `READ_BYTES`, as snapshots do; what is left comes in the next turn of the loop."""
_GONE = select.EPOLLHUP | select.EPOLLERR
LEAST_BUSY = 2
"""Sockets that a read found ready: from then on the next one is due without another look."""


class StateSockets:
    """Create inside a running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._transports: dict[int, SocketTransport] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_watched = False
        self.read_at = 0.0
        """The latest time, by the event loop's clock."""

    @property
    def has_timer(self) -> bool:
        return self._timer is not None

    def attach(self, sock: socket.socket, protocol: asyncio.Protocol) -> SocketTransport:
        """`sock`: connected, and from now on this object's."""
        transport = SocketTransport(self, self._loop, sock, protocol)
        self._transports[sock.fileno()] = transport
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        protocol.connection_made(transport)
        if self._timer is None:
            self._watch()
        return transport

    def close(self) -> None:
        for transport in list(self._transports.values()):
            transport.abort()
        self._unwatch()
        if self._timer is not None:
            self._timer.cancel()
        self._epoll.close()

    # What the transports call.

    def select(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def detach(self, fd: int) -> None:
        if self._transports.pop(fd, None) is not None and not self._epoll.closed:
            self._epoll.unregister(fd)

    # What the event loop calls.

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            self._loop.add_reader(self._epoll.fileno(), self._on_ready)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._epoll.fileno())

    def _on_ready(self) -> None:
        if self._loop.time() - self.read_at >= SPARSE_S:
            self._read_all()
        else:
            self._unwatch()
            self._timer = self._loop.call_at(self.read_at + INTERVAL_S, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        if self._read_all() >= LEAST_BUSY:
            self._timer = self._loop.call_at(self.read_at + INTERVAL_S, self._on_time)
        else:
            self._watch()

    def _read_all(self) -> int:
        """Read all readable sockets. Return how many had data."""
        self.read_at = self._loop.time()
        ready, transports = self._epoll.poll(0), self._transports
        for fd, events in ready:
            if (transport := transports.get(fd)) is not None:
                transport.handle(events)
        return len(ready)


class SocketTransport(asyncio.Transport):
    """One of the sockets, for its protocol."""

    def __init__(
        self, sockets: StateSockets, loop: asyncio.AbstractEventLoop, sock: socket.socket, protocol: asyncio.Protocol
    ) -> None:
        super().__init__({"socket": sock, "peername": sock.getpeername()})
        self._sockets = sockets
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._protocol = protocol
        self._unsent = b""
        self._reads, self._is_closing = True, False

    def handle(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._send()
        if self._reads:
            self._receive(READ_BYTES)
        elif events & _GONE:
            self._end(ConnectionResetError("the engine hung up"))

    def _receive(self, num_bytes: int) -> None:
        if not self._reads or self._is_closing:
            return
        try:
            data = self._sock.recv(num_bytes)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)
            return
        if not data:
            self._end(None)
            return
        try:
            self._protocol.data_received(data)
        except Exception as error:  # the others' frames must be read all the same
            self._loop.call_exception_handler({"message": "a state stream failed", "exception": error})
            self._end(None)
        if len(data) == num_bytes:
            self._loop.call_soon(self._receive, SNAPSHOT_READ_BYTES)

    def _send(self) -> None:
        try:
            num_sent = self._sock.send(self._unsent)
        except BlockingIOError:
            num_sent = 0
        except OSError as error:
            self._end(error)
            return
        self._unsent = self._unsent[num_sent:]
        self._select()

    def _select(self) -> None:
        if not self._is_closing:
            wanted = (select.EPOLLIN if self._reads else 0) | (select.EPOLLOUT if self._unsent else 0)
            self._sockets.select(self._fd, wanted)

    def _end(self, error: OSError | None) -> None:
        """Nothing more is read or sent. The protocol learns it in a turn of its own, as from any transport."""
        if not self._is_closing:
            self._is_closing = True
            self._sockets.detach(self._fd)
            self._loop.call_soon(self._lost, error)

    def _lost(self, error: OSError | None) -> None:
        self._sock.close()
        self._protocol.connection_lost(error)

    # What the protocol calls.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:
            return
        has_more = bool(self._unsent)
        self._unsent += bytes(data)
        if not has_more:
            self._send()

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def pause_reading(self) -> None:
        self._reads = False
        self._select()

    def resume_reading(self) -> None:
        self._reads = True
        self._select()

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Close at once. The only data to send is the request, which was sent long before."""
        self._end(None)

    def abort(self) -> None:
        self._end(None)


class StateConnector(Connector):
    """Connects as others do, and has plain connections read by `sockets`."""

    def __init__(self, timeout_s: float, trust: ssl.SSLContext, sockets: StateSockets) -> None:
        super().__init__(timeout_s, trust)
        self._sockets = sockets

    async def _connect_to(self, address: str, origin: Origin, make: Callable[[], Connection]) -> Connection:
        if origin.is_tls:
            return await super()._connect_to(address, origin, make)
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, (address, origin.port))
            protocol = make()
            self._sockets.attach(sock, protocol)
        except BaseException:
            sock.close()
            raise
        return protocol
