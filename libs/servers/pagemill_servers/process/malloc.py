"""Returns freed memory to the system, for processes that free much at once.

The C library keeps what is freed, to use it again. Its limit for blocks of their own grows up to 32 MiB with the blocks
that are freed, and smaller ones share a heap, where one small block that is still used keeps all below it.
"""

from __future__ import annotations

import contextlib
import ctypes

LARGE_BLOCK_BYTES = 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""
MAX_ARENAS = 4
"""Arenas of all threads together; by default there are eight for each core, and each keeps memory of its own."""


def return_large_blocks() -> None:
    """Make freed blocks of `LARGE_BLOCK_BYTES` return to the system at once, as bodies of requests and answers are.

    Call it before threads start. It has no effect with a C library that has no such parameters.
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
