"""Read a large file as several concurrent ranges, in order, since one connection may be slow where several are fast.

The module uses neither stores nor files: `object_store` reads a range, `store.part` takes the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event
from typing import Any

RANGE_BYTES = 8 * 1024 * 1024
NUM_RANGES = 4
"""Ranges that are read ahead: 128 MiB with four files at once."""

ReadRange = Callable[[int, int], Iterator[Any]]
"""Yields the content from one byte up to another, exclusive, in chunks as they arrive."""


def read_in_order(read: ReadRange, start: int, end: int, num_ranges: int = NUM_RANGES) -> Iterator[Any]:
    """Yield chunks of the bytes from `start` up to `end`, exclusive, reading `num_ranges` ranges at once.

    When a range fails, its chunks so far are yielded before its error is raised; ranges after it are lost.
    """
    if end - start <= RANGE_BYTES:
        yield from read(start, end)
        return
    starts = iter(range(start, end, RANGE_BYTES))
    ends = Event()
    pool = ThreadPoolExecutor(num_ranges, thread_name_prefix="range")
    ahead: list[_Range] = []
    try:
        while True:
            while len(ahead) < num_ranges and (first := next(starts, None)) is not None:
                ahead.append(_Range(read, first, min(first + RANGE_BYTES, end), ends))
                pool.submit(ahead[-1].run)
            if not ahead:
                return
            yield from ahead.pop(0).chunks()
    finally:
        ends.set()
        # A stalled connection must not delay the error of another one.
        pool.shutdown(wait=False, cancel_futures=True)


class _Range:
    """A range that a separate thread reads."""

    def __init__(self, read: ReadRange, start: int, end: int, ends: Event) -> None:
        self._read = read
        self._start, self._end = start, end
        self._ends = ends
        self._arrived: SimpleQueue[Any] = SimpleQueue()

    def run(self) -> None:
        try:
            for chunk in self._read(self._start, self._end):
                self._arrived.put(chunk)
                if self._ends.is_set():
                    return
            self._arrived.put(None)
        except Exception as error:
            self._arrived.put(error)

    def chunks(self) -> Iterator[Any]:
        while (chunk := self._arrived.get()) is not None:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk
