"""Memory for weights, which is filled once and kept: small pages at first, huge ones when the processor is idle.

numpy asks for huge pages, and a system that has been up for a while moves other pages at each first touch: reading a
gibibyte took five times as long. Kernels that read all weights for each token gain some percent with huge pages, so
kept memory is collapsed into huge pages later, on a thread that takes only idle time.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import mmap
import os
import threading
import weakref

import numpy as np
from numpy.typing import DTypeLike

from pagemill_kernels.arrays import Array, address, empty

logger = logging.getLogger(__name__)

LEAST_BYTES = 4 * 1024**2
"""Size from which on numpy asks for huge pages."""
PIECE_BYTES = 8 * 1024**2
"""Bytes that one call collapses; other threads of the process may wait for it."""
MADV_COLLAPSE = 25
"""Constant of Linux 6.1 and later."""
LOWEST_PRIORITY = 19
_TRANSIENT = frozenset({errno.ENOMEM, errno.EAGAIN, errno.EBUSY})
"""Errors of one piece only: no huge page is available, or the pages are in use."""

_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def empty_weights(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """Return an uninitialized array like `arrays.empty`, whose pages `collapse_when_idle` collapses."""
    sizes = (shape,) if isinstance(shape, int) else shape
    num_bytes = math.prod(sizes) * np.dtype(dtype).itemsize
    if num_bytes < LEAST_BYTES:
        return empty(shape, dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _mapped.add(pages)
    return np.frombuffer(pages, dtype).reshape(sizes)


def collapse_when_idle() -> threading.Thread:
    """Collapse all memory kept so far into huge pages, on a thread. Systems without this feature are left unchanged."""
    thread = threading.Thread(target=_collapse_in_idle_time, name="huge-pages", daemon=True)
    thread.start()
    return thread


def _collapse_in_idle_time() -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        for pages in list(_mapped):
            _collapse(pages)
    except OSError as error:
        logger.debug("weights stay in small pages: %s", error)


def _collapse(pages: mmap.mmap) -> None:
    """Collapse the pages. Raises `OSError` if the system does not support it."""
    memory = np.frombuffer(pages, np.uint8)  # keeps the memory from being freed meanwhile
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # A piece without a whole huge page is refused as if the system had none, so the last one may be longer.
    for start in range(0, len(memory) - LEAST_BYTES + 1, PIECE_BYTES):
        piece = (
            memory[start:] if len(memory) - start < PIECE_BYTES + LEAST_BYTES else memory[start : start + PIECE_BYTES]
        )
        if advise(address(piece), len(piece), MADV_COLLAPSE) and ctypes.get_errno() not in _TRANSIENT:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
