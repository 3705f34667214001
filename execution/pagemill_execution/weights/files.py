"""Reads files of weights by `pread` straight into their destination, several pieces at a time.

If the model is still being fetched, a file is waited for when its first bytes are read. A memory map would cost a page
fault for each 64 KiB, which takes longer than the copy. `ReadAhead` asks the system for the bytes that follow.
`safetensors_folder` and `gguf_weights` interpret the bytes.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.floats import copy_floats
from pagemill_kernels.arrays import Array
from pagemill_kernels.pieces import each_piece
from pagemill_models.files.partial_download import awaited_bytes, wait_until_complete
from pagemill_models.files.regular_file import open_regular
from pagemill_models.sharding.slices import TensorSlice
from pagemill_models.sources.by_parts import ModelParts, has_parts
from pagemill_protocol.source_errors import FetchError, UnreadableModelError

PIECE_BYTES = 2 * 1024**2
COLUMNS_BYTES = 64 * 1024**2
"""Rows that are read at once for their columns from a network."""


class WeightFiles:
    """Open files of weights, named by their indices in `paths`."""

    def __init__(self, paths: Sequence[Path], root: Path | None = None) -> None:
        """Open the files. Raises `LoadError`. `root`: the model's folder, by default the one that contains a file."""
        self._paths = paths
        self._files: list[int] = []
        folder = root or (paths[0].parent if paths else Path())
        self._remote = ModelParts(folder) if has_parts(folder) else None
        self._awaited = {number for number, path in enumerate(paths) if awaited_bytes(path) is not None}
        weakref.finalize(self, _close, self._files)
        for path in paths:
            try:
                self._files.append(open_regular(path, root))
            except UnreadableModelError as error:
                raise LoadError(error.reason, error.message) from error
        self._ahead = ReadAhead(self._files)

    @property
    def is_remote(self) -> bool:
        """Whether bytes come from a network, and the files have headers only."""
        return self._remote is not None

    def wait_for_all(self) -> None:
        """Wait until all files are complete. Raises `LoadError`."""
        for file in sorted(self._awaited):
            self._wait_for(file)

    def read(self, file: int, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        out = np.empty(num_bytes, dtype=np.uint8)
        self.fill(file, offset, out)
        return out

    def fill(self, file: int, offset: int, out: Array) -> None:
        """Fill `out`, contiguous, with the bytes from `offset` on. Raises `LoadError` if the file ends before."""
        self._wait_for(file)
        flat = out.reshape(-1).view(np.uint8)
        if self._remote is not None:
            self._fill(file, offset, flat)
            return
        self._ahead.reading(file, offset, len(flat))
        each_piece(len(flat), 1, lambda piece: self._fill(file, offset + piece.start, flat[piece]), PIECE_BYTES)

    def fill_floats(self, file: int, offset: int, dtype: np.dtype[Any], out: Array) -> None:
        """Fill `out` with floats of type `dtype`, rounded to the type of `out`.

        Types: those of `pagemill_kernels.arrays`.
        """
        if out.dtype == dtype:
            self.fill(file, offset, out)
            return
        self._wait_for(file)
        flat = out.reshape(-1)
        if self._remote is not None:
            given = np.empty(len(flat), dtype=dtype)
            self._fill(file, offset, given.view(np.uint8))
            copy_floats(given, flat)
            return
        self._ahead.reading(file, offset, len(flat) * dtype.itemsize)
        kept = threading.local()  # freeing and allocating memory for each piece would cost page faults

        def convert(piece: slice) -> None:
            if not hasattr(kept, "buffer"):
                kept.buffer = np.empty(piece.stop - piece.start, dtype=dtype)
            stored = kept.buffer[: piece.stop - piece.start]
            self._fill(file, offset + piece.start * dtype.itemsize, stored.view(np.uint8))
            copy_floats(stored, flat[piece])

        each_piece(len(flat), 1, convert)

    def fill_part(
        self, file: int, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], found: TensorSlice, out: Array
    ) -> None:
        """Fill `out`, contiguous, with some rows or columns of a tensor, like `fill_floats`; bytes stay bytes.

        `shape`: of the whole tensor; `out` has that of the part.
        """
        num_values = math.prod(shape[1:])
        row_bytes, at = num_values * dtype.itemsize, 0
        if found.dimension == 0:
            for first, end in found.ranges:
                self.fill_floats(file, offset + first * row_bytes, dtype, out[at : at + end - first])
                at += end - first
            return
        self._wait_for(file)
        if self._remote is not None:
            self._fill_columns(file, offset, dtype, (shape[0], num_values), found, out)
            return
        self._ahead.reading(file, offset, shape[0] * row_bytes)

        def fill(rows: slice) -> None:
            stored = out[rows] if out.dtype == dtype else np.empty((rows.stop - rows.start, found.size), dtype=dtype)
            for row, values in enumerate(stored.view(np.uint8), rows.start):
                at = 0
                for first, end in found.ranges:
                    size = (end - first) * dtype.itemsize
                    self._fill(file, offset + row * row_bytes + first * dtype.itemsize, values[at : at + size])
                    at += size
            if out.dtype != dtype:
                copy_floats(stored, out[rows])

        each_piece(shape[0], found.size, fill)

    def _fill_columns(
        self, file: int, offset: int, dtype: np.dtype[Any], shape: tuple[int, int], found: TensorSlice, out: Array
    ) -> None:
        """Fill `out` with columns of a matrix of a network, whose rows are read whole: a request for the part of each
        row would take longer than the bytes."""
        num_rows = max(1, COLUMNS_BYTES // (shape[1] * dtype.itemsize))
        for first in range(0, shape[0], num_rows):
            rows = np.empty((min(num_rows, shape[0] - first), shape[1]), dtype=dtype)
            self._fill(file, offset + first * shape[1] * dtype.itemsize, rows.reshape(-1).view(np.uint8))
            part = np.concatenate([rows[:, begin:end] for begin, end in found.ranges], axis=1)
            target = out[first : first + len(rows)].reshape(-1)
            if out.dtype == dtype:
                target[:] = part.reshape(-1)
            else:
                copy_floats(part.reshape(-1), target)

    def _wait_for(self, file: int) -> None:
        if file not in self._awaited:
            return
        try:
            wait_until_complete(self._paths[file])
        except UnreadableModelError as error:
            raise LoadError(error.reason, error.message) from error
        self._awaited.discard(file)

    def _fill(self, file: int, offset: int, out: NDArray[np.uint8]) -> None:
        if self._remote is not None:
            try:
                self._remote.read(self._paths[file].name, offset, out.data)
            except FetchError as error:
                raise LoadError(error.reason, error.message) from error
            return
        start = 0
        while start < len(out):
            try:
                num_bytes = os.preadv(self._files[file], [out[start:].data], offset + start)
            except OSError as error:
                raise _unreadable(self._paths[file], error.strerror) from error
            if num_bytes == 0:
                raise _unreadable(self._paths[file], f"it ends before byte {offset + len(out)}")
            start += num_bytes


class RemoteBytes:
    """A tensor's bytes in a file of a network, which are read when they are needed."""

    def __init__(self, files: WeightFiles, file: int, offset: int, num_bytes: int) -> None:
        self._files, self._file, self._offset, self._num_bytes = files, file, offset, num_bytes

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, part: slice, /) -> NDArray[np.uint8]:
        start, end, _ = part.indices(len(self))
        return self._files.read(self._file, self._offset + start, end - start)


def _unreadable(path: Path, problem: str | None) -> LoadError:
    return LoadError("ModelUnreadable", f"`{path}` cannot be read: {problem}. Fetch it again.")


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


logger = logging.getLogger(__name__)

CHUNK_BYTES = 16 * 1024**2
AHEAD_BYTES = 8 * CHUNK_BYTES


class ReadAhead:
    """Asks the system for the bytes behind those that are being read, so that disks work while processors pack.

    Files are read in order, as if they were one. Each chunk is requested once, on a thread, because a request waits
    while a disk's queue is full; a request for cached pages costs next to nothing.
    """

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
