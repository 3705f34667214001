"""What `ring` does over shared memory, over connections: messages from one process to others on other machines.

The bytes are the same. Each reader has a connection of its own; one that leaves no room is named.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping
from typing import Protocol

from pagemill_kernels.ranks.connections import FRAME_HEAD, frame_bytes, send_frame
from pagemill_kernels.ranks.ring import WRITE_SECONDS, ReaderStoppedError, RingClosedError

_PIECE_BYTES = 1 << 16


class TcpWriter:
    def __init__(self, readers: Mapping[str, socket.socket]) -> None:
        """Write to connections by the readers' names, which are for messages."""
        self._readers = readers

    def write(self, message: bytes, seconds: float = WRITE_SECONDS) -> None:
        """As `RingWriter.write`. After an error nothing more can be written."""
        for name, connection in self._readers.items():
            try:
                connection.settimeout(seconds)
                send_frame(connection, message)
            except TimeoutError as error:
                raise ReaderStoppedError(f"{name} has read nothing for {seconds:g} s") from error
            except OSError as error:
                raise RingClosedError(f"{name} has ended its connection") from error

    def close(self) -> None:
        for connection in self._readers.values():
            connection.close()


class Ending(Protocol):
    """What a reader waits for beside messages."""

    @property
    def is_lost(self) -> bool: ...

    @property
    def bell(self) -> int:
        """A descriptor that can be read once `is_lost` may have changed."""
        ...


class TcpReader:
    def __init__(self, connection: socket.socket, ending: Ending) -> None:
        self._connection, self._ending = connection, ending
        self._data = bytearray()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(ending.bell, select.POLLIN)

    def read(self, seconds: float) -> bytes | None:
        """As `RingReader.read`; raises `RingClosedError` also once the group is lost."""
        ends = time.monotonic() + seconds
        while True:
            if self._ending.is_lost:
                raise RingClosedError("the group is lost")
            message = self._message()
            if message is not None:
                return message
            left = ends - time.monotonic()
            if left <= 0:
                return None
            if all(file != self._connection.fileno() for file, _ in self._poll.poll(left * 1000)):
                continue
            try:
                piece = self._connection.recv(_PIECE_BYTES)
            except OSError:
                piece = b""
            if not piece:
                raise RingClosedError("rank 0 has ended its connection")
            self._data += piece

    def _message(self) -> bytes | None:
        if len(self._data) < FRAME_HEAD:
            return None
        try:
            end = FRAME_HEAD + frame_bytes(bytes(self._data[:FRAME_HEAD]))
        except EOFError as error:
            raise RingClosedError(f"rank 0 has sent what is no message: {error}") from error
        if len(self._data) < end:
            return None
        message = bytes(self._data[FRAME_HEAD:end])
        del self._data[:end]
        return message

    def close(self) -> None:
        self._connection.close()
