"""Asks the system for the bytes behind the tensor that is being read, so that disks work while processors pack.

Files are read in order, as if they were one. Each chunk is requested once, on a thread, because a request waits while a
disk's queue is full; a request for cached pages costs next to nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

logger = logging.getLogger(__name__)

CHUNK_BYTES = 16 * 1024**2
AHEAD_BYTES = 8 * CHUNK_BYTES


class ReadAhead:
    def __init__(self, files: Sequence[int]) -> None:
        """Start the thread. `files`: descriptors, which must stay open while the files are read."""
        self._files = files
        self._sizes = [os.fstat(file).st_size for file in files]
        self._asked: set[tuple[int, int]] = set()
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._prefetching: Future[None] | None = None

    def reading(self, file: int, start: int, num_bytes: int) -> None:
        """Record that these bytes are read next. Never waits: while a request is running, this does nothing."""
        if self._prefetching is not None and not self._prefetching.done():
            return
        chunks = [chunk for chunk in self._chunks(file, start, num_bytes + AHEAD_BYTES) if chunk not in self._asked]
        if chunks:
            self._asked.update(chunks)
            self._prefetching = self._thread.submit(_prefetch, self._files, chunks)

    def _chunks(self, file: int, start: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield (file, chunk number) from `start` on, continuing in the following files."""
        while file < len(self._files) and num_bytes > 0:
            stop = min(start + num_bytes, self._sizes[file])
            yield from ((file, number) for number in range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)))
            num_bytes -= stop - start
            file, start = file + 1, 0


def _prefetch(files: Sequence[int], chunks: list[tuple[int, int]]) -> None:
    try:
        for file, number in chunks:
            os.posix_fadvise(files[file], number * CHUNK_BYTES, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
    except OSError:  # the file system does not support the advice, or the files were closed
        logger.debug("weights are not read ahead", exc_info=True)
