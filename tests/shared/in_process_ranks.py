"""A group of threads of one process, which shows what a division of a model computes before any process exists."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import Empty, Queue

import numpy as np

from pagemill_kernels.arrays import Array
from pagemill_kernels.ranks.group import GroupAborted

_POLL_SECONDS = 0.05


@dataclass
class _Meeting:
    """What the ranks share."""

    size: int
    barrier: threading.Barrier
    given: list[Array | None]
    queues: dict[tuple[int, int], Queue[Array]]
    lock: threading.Lock = field(default_factory=threading.Lock)
    reason: str | None = None


class InProcessGroup:
    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting = meeting

    def all_reduce(self, buffer: Array) -> None:
        given = self._exchange(buffer)
        total = given[0].copy()
        for each in given[1:]:
            total += each
        self._wait()  # no buffer changes while another rank reads it
        np.copyto(buffer, total)

    def gather(self, buffer: Array) -> list[Array]:
        given = [each.copy() for each in self._exchange(buffer)]
        self._wait()
        return given

    def send(self, buffer: Array, to: int) -> None:
        self._check()
        self._meeting.queues[self.rank, to].put(buffer.copy())

    def receive(self, buffer: Array, sender: int) -> None:
        while True:
            self._check()
            try:
                np.copyto(buffer, self._meeting.queues[sender, self.rank].get(timeout=_POLL_SECONDS))
                return
            except Empty:
                continue

    def abort(self, reason: str) -> None:
        with self._meeting.lock:
            self._meeting.reason = self._meeting.reason or reason
        self._meeting.barrier.abort()

    def _exchange(self, buffer: Array) -> list[Array]:
        self._meeting.given[self.rank] = buffer
        self._wait()
        return [each for each in self._meeting.given if each is not None]

    def _wait(self) -> None:
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError:
            self._check()
            raise

    def _check(self) -> None:
        if self._meeting.reason is not None:
            raise GroupAborted(self._meeting.reason)


def in_process_groups(size: int) -> list[InProcessGroup]:
    """Return the ends of a group of `size` threads."""
    pairs = {(sender, to): Queue[Array]() for sender in range(size) for to in range(size)}
    meeting = _Meeting(size, threading.Barrier(size), [None] * size, pairs)
    return [InProcessGroup(meeting, rank) for rank in range(size)]
