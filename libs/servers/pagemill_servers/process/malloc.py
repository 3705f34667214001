"""Returns freed memory to the system, for processes that free much at once.

The C library keeps what is freed, to use it again. Its limit for blocks of their own grows up to 32 MiB with the blocks
that are freed, and smaller ones share a heap, where one small block that is still used keeps all below it. So a process
calls `return_freed_memory` before its threads start.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

LARGE_BLOCK_BYTES = 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""
MAX_ARENAS = 4
"""Arenas of all threads together; by default there are eight for each core, and each keeps memory of its own."""


def return_freed_memory() -> None:
    """Return freed memory to the system from now on. Call it before threads start."""
    _return_large_blocks()
    keep_trimmed()


def _return_large_blocks() -> None:
    """Make freed blocks of `LARGE_BLOCK_BYTES` return to the system at once, as bodies of requests and answers are.

    It has no effect with a C library that has no such parameters.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for parameter, value in (
            (_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES),
            (_M_TRIM_THRESHOLD, 2 * LARGE_BLOCK_BYTES),
            (_M_ARENA_MAX, MAX_ARENAS),
        ):
            library.mallopt(parameter, value)


def trim_heap() -> None:
    """Return freed memory, also that of other threads' arenas, to the system where the C library can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


TRIM_EVERY_S = 5.0
LEAST_FREE_BYTES = 64 * 1024 * 1024
"""Free memory in the heap from which it is worth a trim, which takes some 0.1 ms per MiB."""
LEAST_GROWTH_BYTES = 32 * 1024 * 1024
"""Growth of the process since the last trim, before another: what was trimmed still counts as free in the heap."""


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class HeapTrimmer:
    def __init__(self, free_bytes: Callable[[], int], resident_bytes: Callable[[], int]) -> None:
        """`free_bytes`: free memory in the heap. `resident_bytes`: memory of the process."""
        self._free_bytes = free_bytes
        self._resident_bytes = resident_bytes
        self._after_last_bytes = 0

    def trim_if_due(self) -> bool:
        """Return free memory to the system if there is much and the process has grown. Return whether it did."""
        if self._resident_bytes() < self._after_last_bytes + LEAST_GROWTH_BYTES:
            return False
        if self._free_bytes() < LEAST_FREE_BYTES:
            return False
        trim_heap()
        self._after_last_bytes = self._resident_bytes()
        return True


def keep_trimmed(every_s: float = TRIM_EVERY_S) -> None:
    """Start a thread that returns memory to the system after large bodies and answers were freed."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):  # another C library, or glibc before 2.33
        return
    library.mallinfo2.restype = _MallInfo
    trimmer = HeapTrimmer(lambda: int(library.mallinfo2().fordblks), _resident_bytes)

    def run() -> None:
        while True:
            time.sleep(every_s)
            trimmer.trim_if_due()

    threading.Thread(target=run, name="trim", daemon=True).start()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
