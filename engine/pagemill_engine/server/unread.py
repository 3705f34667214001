"""The memory of all answers that wait for their readers, and the choice of those that end when there is too much.

`answer` counts what it holds here. `engine_client` ends the answers that `excess` names. Nothing is ended here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol
from weakref import WeakSet

MAX_UNREAD_BYTES_IN_ALL = 256 * 1024 * 1024
"""Default of the setting `max_unread_bytes`."""
SLOW_S = 1.0
"""Seconds without reading after which a reader is slow. A pause of this process itself makes no reader slow."""
SHARE_AFTER = 7 / 8
"""Share of the limit that is in use after answers were ended, so that the next output does not end another one."""


class Holder(Protocol):
    """An answer that holds memory."""

    num_held_bytes: int
    """All bytes: unread frames, and what is collected for a body."""
    num_unread_bytes: int
    """The part that a reader could take now."""
    read_at: float
    """Time at which the reader last took something, or the answer began; monotonic, in seconds."""


class UnreadAnswers:
    def __init__(self, max_bytes: int = MAX_UNREAD_BYTES_IN_ALL) -> None:
        self.num_bytes = 0
        """Bytes of all holders; each adds and subtracts its own."""
        self._max_bytes = max_bytes
        self._holders: WeakSet[Holder] = WeakSet()

    @property
    def is_full(self) -> bool:
        return self.num_bytes > self._max_bytes

    def add(self, holder: Holder) -> None:
        """Consider an answer, as long as it exists, when there is too much."""
        self._holders.add(holder)

    def excess(self) -> Iterator[Holder]:
        """Yield the answers to end until enough memory is free: each must be ended before the next is asked for.

        Slow readers come first, by bytes times seconds, so that one with little to read is spared for a while; then
        the answers that hold most.
        """
        now = time.monotonic()
        held = [each for each in self._holders if each.num_held_bytes]
        for holder in sorted(held, key=lambda each: _rank(each, now)):
            if self.num_bytes <= SHARE_AFTER * self._max_bytes:
                return
            yield holder


def _rank(holder: Holder, now: float) -> tuple[bool, float]:
    waited_s = now - holder.read_at
    is_slow = bool(holder.num_unread_bytes) and waited_s > SLOW_S
    return not is_slow, -(holder.num_unread_bytes * waited_s if is_slow else holder.num_held_bytes)
