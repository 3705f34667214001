"""A sorted set of sequences: the waiting queue and the running batch.

Sizes are bounded (at most a few thousand), so a sorted list beats a tree: insertion is one memory move, and iteration
costs nothing extra.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from pagemill_engine.scheduler.sequence import Sequence
from pagemill_protocol.request.sampling import LOW_PRIORITY

OrderKey = Callable[[Sequence], tuple[int, ...]]


def serving_key(request: Sequence) -> tuple[int, ...]:
    """Return the key that orders running sequences, by priority first.

    The last sequence, the newest of the lowest priority, is preempted first.
    """
    return (request.priority, request.arrival, request.choice)


def low_priority_last(rank: OrderKey) -> OrderKey:
    """Return the order `rank`, with low-priority sequences behind all others."""
    return lambda seq: (int(seq.is_low_priority), *rank(seq))


LOW_PRIORITY_SERVING, LOW_PRIORITY_WAITING = (LOW_PRIORITY,), (1,)
"""The first possible keys of low-priority sequences: by `serving_key`, and by an order of `low_priority_last`."""


class SortedSequences:
    """Sequences sorted by a unique key; `arrival` and `choice` of each sequence make keys unique."""

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._keys: list[tuple[int, ...]] = []
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, request: Sequence) -> bool:
        index = bisect_left(self._keys, self._key(request))
        return index < len(self._sequences) and self._sequences[index] is request

    def first(self) -> Sequence:
        return self._sequences[0]

    def last_except(self, spared: Sequence | None) -> Sequence:
        """Return the last sequence that is not `spared`, or `spared` if there is no other."""
        last = self._sequences[-1]
        return self._sequences[-2] if last is spared and len(self._sequences) > 1 else last

    def num_from(self, least: tuple[int, ...]) -> int:
        """Return how many sequences have a key that is not before `least`."""
        return len(self._keys) - bisect_left(self._keys, least)

    def add(self, request: Sequence) -> None:
        key = self._key(request)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._sequences.insert(index, request)

    def remove(self, request: Sequence) -> None:
        index = bisect_left(self._keys, self._key(request))
        if index == len(self._sequences) or self._sequences[index] is not request:
            raise KeyError(request.request_id)
        del self._keys[index]
        del self._sequences[index]
