"""What the C library's allocator keeps of freed memory, for processes that free much at once."""

from __future__ import annotations

import contextlib
import ctypes


def give_back() -> None:
    """It goes back to the machine, that of other threads' arenas too, where it is a library that can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
