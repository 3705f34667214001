"""Memory that processes of one machine share: a file without a name, which children inherit."""

from __future__ import annotations

import ctypes
import mmap
import os


class SharedMemory:
    """Zeros at first. It is gone once every process that has it open has ended."""

    def __init__(self, file: int, num_bytes: int) -> None:
        """Map an open file. `file`: a descriptor, which the object owns."""
        self.file = file
        self.num_bytes = num_bytes
        self._map = mmap.mmap(file, num_bytes)
        self._start = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._start)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """Create memory whose descriptor children may inherit (`pass_fds`)."""
        file = os.memfd_create("pagemill-ranks")
        os.ftruncate(file, num_bytes)
        return cls(file, num_bytes)

    def close(self) -> None:
        """Unmap the memory. Nothing may use its address any more."""
        del self._start
        self._map.close()
        os.close(self.file)
