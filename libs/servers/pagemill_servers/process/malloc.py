"""Release freed memory that the C library's allocator retains, for processes that free much at once."""

from __future__ import annotations

import contextlib
import ctypes


def trim_heap() -> None:
    """Return freed memory, also that of other threads' arenas, to the system where the C library can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
