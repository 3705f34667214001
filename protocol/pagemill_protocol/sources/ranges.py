"""A large file read as several ranges at once, given out in order: one connection alone is slow where many are fast.

Knows neither stores nor files: `object_store` says how a range is read, `store.part` takes what comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event
from typing import Any

RANGE_BYTES = 8 * 1024 * 1024
NUM_RANGES = 4
"""Ranges that are read ahead: with four files at once 128 MiB."""

ReadRange = Callable[[int, int], Iterator[Any]]
"""The content from a byte to the one before another, in chunks as they arrive."""


def read_in_order(read: ReadRange, start: int, end: int, num_ranges: int = NUM_RANGES) -> Iterator[Any]:
    """Chunks of the bytes from `start` to before `end`, of so many ranges at once.

    Of a range that fails, what had arrived is given out before its error is raised. What was read ahead is lost then.
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
        # A connection that stalls must not hold up what another one's error says.
        pool.shutdown(wait=False, cancel_futures=True)


class _Range:
    """Read by a thread of its own."""

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
