"""Raw connections of an attacker: they send what and when they like, and read only if asked to."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import re
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

CONNECT_LIMIT_S = 5.0
SMALL_BUFFER_BYTES = 4096
LOOK_EVERY_S = 0.05
MAX_HEAD_BYTES = 65_536
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


class Wire:
    """One connection."""

    def __init__(self, url: str, sock: socket.socket) -> None:
        self.url = url
        self._socket = sock

    @classmethod
    async def open(cls, url: str, *, source: str = "", buffer_bytes: int = 0) -> Wire | None:
        """Connect, from the local address `source`; return None if the server does not take the connection."""
        parts = urlsplit(url)
        sock = socket.socket()
        sock.setblocking(False)
        if buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        if source:
            sock.bind((source, 0))
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
        except OSError:  # also a timeout
            sock.close()
            return None
        return cls(url, sock)

    async def send(self, data: bytes, limit_s: float = 1.0) -> bool:
        """Send; return whether the server took all of it in time."""
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.get_running_loop().sock_sendall(self._socket, data)
        except OSError:
            return False
        return True

    async def read(self, limit_s: float, max_bytes: int = 64 * 2**20) -> bytes:
        """Return what comes until the end of the connection, of the time, or of `max_bytes`."""
        pieces, num_bytes = [], 0
        with contextlib.suppress(OSError):
            async with asyncio.timeout(limit_s):
                while num_bytes < max_bytes and (piece := await self._receive()):
                    pieces.append(piece)
                    num_bytes += len(piece)
        return b"".join(pieces)

    def begun(self) -> bytes:
        """Return the first bytes of what came and was not read, without reading them."""
        try:
            return self._socket.recv(15, socket.MSG_PEEK)
        except OSError:
            return b""

    async def answer(self, limit_s: float = 10.0) -> Answer | None:
        """Read one whole answer; None if the connection ends without one or the time is over."""
        received = bytearray()
        with contextlib.suppress(OSError):
            async with asyncio.timeout(limit_s):
                while piece := await self._receive():
                    received += piece
                    if may_be_whole(received) and (found := parsed(bytes(received))) is not None:
                        return found
        return parsed(bytes(received))

    async def ended(self, limit_s: float) -> bool:
        """Return whether the server ends the connection in time; what it sends is dropped."""
        try:
            async with asyncio.timeout(limit_s):
                while await self._receive():
                    pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    async def _receive(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._socket, 65536)

    def finish_sending(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, *, reset: bool = False) -> None:
        """Close with FIN, or with RST."""
        if reset:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


class _Received:
    """Bytes for `http.client`, which wants a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._data)


def may_be_whole(received: bytearray) -> bool:
    """Whether these bytes end like an answer, or have its length: parsing large answers takes time."""
    head_end = received.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    length = LENGTH.search(received, 0, max(0, head_end + 2))
    if length is not None:
        return len(received) >= head_end + 4 + int(length[1])
    return head_end >= 0 and received.endswith(b"\r\n")


def parsed(received: bytes) -> Answer | None:
    """Return the first whole answer of these bytes, or None."""
    if b"\r\n\r\n" not in received:
        return None
    response = http.client.HTTPResponse(_Received(received))  # type: ignore[arg-type]
    try:
        response.begin()
        body = response.read()
    except (http.client.HTTPException, ValueError):
        return None
    if response.length:
        return None
    return Answer(response.status, {key.lower(): value for key, value in response.getheaders()}, body)


def head(
    path: str, key: str = "", *, method: str = "POST", length: int | None = None, fields: Iterable[str] = ()
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *fields]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if length is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


def post(path: str, body: Any, key: str) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(path, key, length=len(raw)) + raw


async def ask(url: str, path: str, body: Any, key: str, limit_s: float = 20.0) -> Answer | None:
    """Send one request over its own connection and read its answer."""
    async with wires(url, 1) as opened:
        if not opened or not await opened[0].send(post(path, body, key), limit_s):
            return await opened[0].answer(limit_s) if opened else None
        return await opened[0].answer(limit_s)


@contextlib.asynccontextmanager
async def wires(url: str, number: int, *, source: str = "", buffer_bytes: int = 0) -> AsyncIterator[list[Wire]]:
    """Open this many connections, in groups that a backlog holds; those that the server refuses are left out."""
    opened: list[Wire] = []
    try:
        for first in range(0, number, 200):
            group = range(first, min(number, first + 200))
            found = await asyncio.gather(*(Wire.open(url, source=source, buffer_bytes=buffer_bytes) for _ in group))
            opened += [each for each in found if each is not None]
            if not opened:
                break
        yield opened
    finally:
        for each in opened:
            each.close()


async def exchange(url: str, request: bytes) -> Answer | None:
    """Send these bytes over a new connection and read the first answer."""
    async with wires(url, 1) as opened:
        if not opened:
            return None
        await opened[0].send(request)
        return await opened[0].answer()


async def answering(opened: list[Wire], number: int, limit_s: float) -> dict[str, int]:
    """Wait until this many connections have the beginning of an answer; return how many have which status."""
    for _ in range(int(limit_s / LOOK_EVERY_S)):
        statuses = Counter(each.begun()[9:12].decode() for each in opened)
        if len(opened) - statuses[""] >= number:
            break
        await asyncio.sleep(LOOK_EVERY_S)
    return {status or "none": count for status, count in statuses.items()}
