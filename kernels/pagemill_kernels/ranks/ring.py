"""A ring of messages from one process to others over shared memory (cpu/src/ring.cpp).

Every reader reads every message. The writer waits for the slowest one, but not for ever: it names who does not read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from pagemill_kernels.cpu import launch, library
from pagemill_kernels.ranks.memory import SharedMemory

WRITE_SECONDS = 5.0
_CLOSED, _WRITTEN = -2, -1
_PIECE, _LAST = 1, 2


class RingClosedError(RuntimeError):
    """One end has closed the ring, and everything is read."""


class ReaderStoppedError(RuntimeError):
    """A reader has not read in time; the message names it."""


def ring_bytes(slots: int, slot_bytes: int) -> int:
    """Return the bytes of the shared memory of a ring."""
    return int(launch.native().pagemill_ring_bytes(slots, slot_bytes))


class RingWriter:
    def __init__(self, memory: SharedMemory, slots: int, slot_bytes: int, readers: Sequence[str]) -> None:
        """Open the writing end. `memory`: of at least `ring_bytes`. `readers`: their names, for messages."""
        self._memory, self._names = memory, readers
        self._native = launch.native()
        self._ring = library.Ring(shared=memory.address, slots=slots, slot_bytes=slot_bytes, readers=len(readers))

    def write(self, message: bytes, seconds: float = WRITE_SECONDS) -> None:
        """Give a message to all readers. Raises `ReaderStoppedError` if one leaves no room for so long, and
        `RingClosedError`."""
        found = self._native.pagemill_ring_write(self._ring, message, len(message), int(seconds * 1000))
        if found == _CLOSED:
            raise RingClosedError("the ring is closed")
        if found != _WRITTEN:
            raise ReaderStoppedError(f"{self._names[found]} has read nothing for {seconds:g} s")

    def close(self) -> None:
        """Let readers read what is there, and then find the end."""
        self._native.pagemill_ring_close(self._ring)


class RingReader:
    def __init__(self, memory: SharedMemory, slots: int, slot_bytes: int, reader: int) -> None:
        """Open a reading end. `reader`: its index in the writer's names."""
        self._memory = memory
        self._native = launch.native()
        self._ring = library.Ring(shared=memory.address, slots=slots, slot_bytes=slot_bytes, reader=reader)
        self._pieces: list[bytes] = []

    def read(self, seconds: float) -> bytes | None:
        """Return the next message, or None if none is complete after so long. Raises `RingClosedError`."""
        piece, size = ctypes.c_void_p(), ctypes.c_int64()
        while True:
            found = self._native.pagemill_ring_next(
                self._ring, int(seconds * 1000), ctypes.byref(piece), ctypes.byref(size)
            )
            if found not in (_PIECE, _LAST):
                if found == 0:
                    return None
                raise RingClosedError("the ring is closed")
            self._pieces.append(ctypes.string_at(piece.value or 0, size.value))
            self._native.pagemill_ring_done(self._ring)
            if found == _LAST:
                message, self._pieces = b"".join(self._pieces), []
                return message

    def close(self) -> None:
        self._native.pagemill_ring_close(self._ring)
