"""Processes large arrays in pieces of rows: temporaries stay in the cache, and several threads share the pieces.

numpy releases the interpreter lock while it computes, so Python threads are enough. They live as long as the call,
because loading, which uses this, happens once in a process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

PIECE_ELEMENTS = 1 << 18
_FEW = 4
"""Most pieces that are done faster without threads."""


def each_piece(
    num_rows: int, row_elements: int, work: Callable[[slice], object], piece_elements: int | None = None
) -> None:
    """Call `work` with slices that together cover all rows, each of about `piece_elements`; in any order,
    concurrently."""
    step = max(1, (piece_elements or PIECE_ELEMENTS) // max(1, row_elements))
    pieces = [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
    num_threads = min(len(os.sched_getaffinity(0)), len(pieces))

    def do(piece: slice) -> None:
        with np.errstate(all="ignore"):  # a thread begins with the default; weights need not be finite
            work(piece)

    if len(pieces) <= _FEW or num_threads == 1:
        for piece in pieces:
            do(piece)
        return
    with ThreadPoolExecutor(num_threads, "pieces") as threads:
        for _ in threads.map(do, pieces):
            pass
