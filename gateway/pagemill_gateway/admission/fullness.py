"""What a refusal teaches: the engine takes no more than it had of us then, until one of ours ends or a pause is over.

After the pause one request at a time asks again; each refusal in a row doubles the pause. It replaces what is unknown
of an engine whose reports are old, lag, or say nothing of its limits. Pure: time comes in.
"""

from __future__ import annotations

BASE_S = 0.25
MAX_S = 4.0


class Fullness:
    def __init__(self) -> None:
        self._full_at: int | None = None
        """So many of our requests were there when it refused one more; `None`: it did not."""
        self._until = 0.0
        self._num_refusals = 0

    def refused(self, in_flight: int, now: float) -> None:
        """It refused one request while `in_flight` others of ours were there."""
        self._full_at = in_flight
        self._until = now + min(MAX_S, BASE_S * 2.0 ** min(self._num_refusals, 10))
        self._num_refusals += 1

    def accepted(self) -> None:
        self._full_at = None
        self._num_refusals = 0

    def allows(self, in_flight: int, now: float) -> bool:
        return self._full_at is None or in_flight < self._full_at or now >= self._until

    def chosen(self, in_flight: int, now: float) -> None:
        """One goes there while `in_flight` others are: beyond what was refused, it is the one that asks again."""
        if self._full_at is not None and in_flight >= self._full_at:
            self._until = now + MAX_S
