"""A sorted set of requests: the waiting queue and the running rows.

Sizes are bounded (at most a few thousand), so a sorted list beats any tree: insertion is a memory move, iteration free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from pagemill_engine.scheduler.request import Request

OrderKey = Callable[[Request], tuple[int, ...]]


def serving_key(request: Request) -> tuple[int, ...]:
    """Order of the running rows: the last one, the newest of the lowest priority, is preempted first."""
    return (request.priority, request.arrival, request.choice)


class SortedRows:
    """Keys must be unique; each request carries `arrival` and `choice`, which make them so."""

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._keys: list[tuple[int, ...]] = []
        self._rows: list[Request] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._rows)

    def __contains__(self, request: Request) -> bool:
        index = bisect_left(self._keys, self._key(request))
        return index < len(self._rows) and self._rows[index] is request

    def first(self) -> Request:
        return self._rows[0]

    def last_except(self, spared: Request | None) -> Request:
        """The last row that is not `spared`; `spared` itself when it is alone."""
        last = self._rows[-1]
        return self._rows[-2] if last is spared and len(self._rows) > 1 else last

    def add(self, request: Request) -> None:
        key = self._key(request)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._rows.insert(index, request)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._keys, self._key(request))
        if index == len(self._rows) or self._rows[index] is not request:
            raise KeyError(request.request_id)
        del self._keys[index]
        del self._rows[index]
