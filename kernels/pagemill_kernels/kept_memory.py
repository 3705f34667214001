"""Memory that is filled at once and kept, as weights are: small pages at first, huge ones when the processor is idle.

numpy asks for huge pages, for which a system that has been up for a while moves others at each first touch: reading
a gibibyte took five times as long. Kernels that read all weights for each token gain some percent by them, so what is
kept is joined to huge pages afterwards, on a thread that takes idle time only.
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
"""From here on numpy asks for huge pages."""
PIECE_BYTES = 8 * 1024**2
"""That are joined by one call, which others of the process may wait for."""
MADV_COLLAPSE = 25
"""Since Linux 6.1."""
LOWEST_PRIORITY = 19
_PASSING = frozenset({errno.ENOMEM, errno.EAGAIN, errno.EBUSY})
"""No huge page for this piece, or its pages are in use just now."""

_kept: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def kept(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """As `arrays.empty`."""
    sizes = (shape,) if isinstance(shape, int) else shape
    num_bytes = math.prod(sizes) * np.dtype(dtype).itemsize
    if num_bytes < LEAST_BYTES:
        return empty(shape, dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _kept.add(pages)
    return np.frombuffer(pages, dtype).reshape(sizes)


def join_when_idle() -> threading.Thread:
    """Join all that is kept by now, on a thread. Systems that cannot are left as they are."""
    thread = threading.Thread(target=_join_in_idle_time, name="huge-pages", daemon=True)
    thread.start()
    return thread


def _join_in_idle_time() -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        for pages in list(_kept):
            _join(pages)
    except OSError as error:
        logger.debug("weights stay in small pages: %s", error)


def _join(pages: mmap.mmap) -> None:
    """Raises `OSError` where the system knows no such request."""
    memory = np.frombuffer(pages, np.uint8)  # it is not given back meanwhile
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in range(0, len(memory), PIECE_BYTES):
        piece = memory[start : start + PIECE_BYTES]
        if advise(address(piece), len(piece), MADV_COLLAPSE) and ctypes.get_errno() not in _PASSING:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
