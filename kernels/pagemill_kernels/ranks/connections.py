"""Connections between ranks on several machines: who opens one proves that it knows the engine's token.

Each side shows a keyed digest of both sides' random numbers, so that neither the token nor an old answer is of use to
who listens; the traffic itself is not encrypted. Messages are frames of bytes behind their length. Nothing of what
arrives is executed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time

MAGIC = b"pagemill-ranks-1"
HANDSHAKE_SECONDS = 5.0
MOST_BYTES = 1 << 30
_NONCE, _ANSWER = 32, b"ok"
_LENGTH = struct.Struct("!I")


class ConnectionRefused(RuntimeError):
    """The other side is no rank, or has another token."""


def opened(host: str, port: int, token: bytes, deadline: float) -> socket.socket:
    """Return a connection to a rank. `deadline`: of `time.monotonic`. Raises `OSError` and `ConnectionRefused`."""
    found = socket.create_connection((host, port), max(0.1, min(HANDSHAKE_SECONDS, deadline - time.monotonic())))
    try:
        own = os.urandom(_NONCE)
        found.settimeout(HANDSHAKE_SECONDS)
        found.sendall(MAGIC + own)
        other = _exactly(found, _NONCE)
        found.sendall(_proof(token, b"opens", own, other))
        answer = _exactly(found, len(_ANSWER) + 32)
        if not hmac.compare_digest(answer, _ANSWER + _proof(token, b"accepts", own, other)):
            raise ConnectionRefused(f"{host}:{port} has another token")
    except BaseException as error:
        found.close()
        if isinstance(error, EOFError | TimeoutError):
            raise ConnectionRefused(
                f"{host}:{port} ended the connection: it has another token, or is no rank"
            ) from error
        raise
    _prepare(found)
    return found


def accepted(found: socket.socket, token: bytes) -> bool:
    """Check who has opened a connection; it is closed if that is no rank with the same token."""
    try:
        found.settimeout(HANDSHAKE_SECONDS)
        given = _exactly(found, len(MAGIC) + _NONCE)
        if given[: len(MAGIC)] == MAGIC:
            theirs, own = given[len(MAGIC) :], os.urandom(_NONCE)
            found.sendall(own)
            if hmac.compare_digest(_exactly(found, 32), _proof(token, b"opens", theirs, own)):
                found.sendall(_ANSWER + _proof(token, b"accepts", theirs, own))
                _prepare(found)
                return True
    except (OSError, EOFError):
        pass
    found.close()
    return False


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket. `port`: 0 takes a free one. Raises `OSError`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(128)
    except BaseException:
        found.close()
        raise
    return found


def send_frame(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive_frame(connection: socket.socket) -> bytes:
    """Return the next message. Raises `EOFError` at the end of the connection."""
    return _exactly(connection, frame_bytes(_exactly(connection, _LENGTH.size)))


def frame_bytes(head: bytes) -> int:
    """Return the length of a frame. Raises `EOFError` for one that no rank sends."""
    (size,) = _LENGTH.unpack(head)
    if size > MOST_BYTES:
        raise EOFError(f"a frame of {size} bytes")
    return int(size)


FRAME_HEAD = _LENGTH.size


def _proof(token: bytes, role: bytes, opening: bytes, accepting: bytes) -> bytes:
    return hmac.new(token, MAGIC + role + opening + accepting, hashlib.sha256).digest()


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError("the connection has ended")
        data += piece
    return bytes(data)


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.settimeout(None)
