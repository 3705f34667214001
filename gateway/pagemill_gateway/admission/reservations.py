"""What this gateway has sent to one engine and its reports do not show yet, and what the engine refused.

A request is reserved when it is sent: the blocks of its prompt that are not cached, and of the output that is expected.
Once the engine has accepted it and two reports have come since, its blocks are in the reports, and only the growth of
its output is still reserved. Pure bookkeeping of one engine; `brain.endpoints.record` checks capacity with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

REPORTS_UNTIL_SEEN = 2
"""After the acceptance: the first report may have been made before it."""
BASE_PAUSE_S = 0.25
MAX_PAUSE_S = 4.0


class Need(NamedTuple):
    """What one request needs of an engine."""

    num_prompt_tokens: int
    num_uncached_tokens: int
    num_output_tokens: int
    """Expected, of each sequence."""
    num_sequences: int = 1
    max_tokens: int | None = None
    gives_way: bool = False
    """It leaves its sequence slots to requests that do not: a line of a batch."""

    @property
    def cost_tokens(self) -> int:
        return self.num_uncached_tokens + self.num_sequences * self.num_output_tokens

    def with_cached(self, num_cached_tokens: int) -> Need:
        """The same with this many of its prompt's tokens cached."""
        return self._replace(num_uncached_tokens=max(1, self.num_prompt_tokens - num_cached_tokens))

    def num_blocks(self, block_size: int) -> int:
        """Sequences share the prompt's blocks; each has its own for the output."""
        num_prompt_blocks = -(-self.num_uncached_tokens // block_size)
        return num_prompt_blocks + self.num_sequences * -(-self.num_output_tokens // block_size)


@dataclass(slots=True)
class _Reservation:
    need: Need
    num_blocks: int
    reports_left: int | None = None
    """Until its blocks are in the reports; `None` while the engine has not accepted it."""


class Reservations:
    def __init__(self) -> None:
        self._open: dict[int, _Reservation] = {}
        self._accepted: dict[int, _Reservation] = {}
        """Accepted and not in the reports yet."""
        self.num_sequences = 0
        """Of all requests there."""
        self.num_sequences_giving_way = 0
        self.num_blocks = 0
        """Of all requests there, in full."""
        self.num_unseen_blocks = 0
        """Of those that no report shows yet."""
        self.num_seen_sequences = 0
        self.num_seen_prompt_tokens = 0
        """Once per sequence, as engines count contexts."""
        self.num_seen_output_tokens = 0
        """Expected."""

    def __len__(self) -> int:
        return len(self._open)

    def reserve(self, decision: int, need: Need, block_size: int) -> None:
        reservation = self._open[decision] = _Reservation(need, need.num_blocks(block_size))
        self.num_sequences += need.num_sequences
        self.num_sequences_giving_way += need.num_sequences * need.gives_way
        self.num_blocks += reservation.num_blocks
        self.num_unseen_blocks += reservation.num_blocks

    def accepted(self, decision: int) -> None:
        """The engine has accepted it."""
        reservation = self._open.get(decision)
        if reservation is not None and reservation.reports_left is None:
            reservation.reports_left = REPORTS_UNTIL_SEEN
            self._accepted[decision] = reservation

    def reported(self) -> None:
        """A report has arrived."""
        for decision, reservation in list(self._accepted.items()):
            assert reservation.reports_left is not None
            reservation.reports_left -= 1
            if reservation.reports_left == 0:
                del self._accepted[decision]
                self._see(reservation, 1)
                self.num_unseen_blocks -= reservation.num_blocks

    def release(self, decision: int) -> Need | None:
        """The request left the engine."""
        reservation = self._open.pop(decision, None)
        if reservation is None:
            return None
        self._accepted.pop(decision, None)
        self.num_sequences -= reservation.need.num_sequences
        self.num_sequences_giving_way -= reservation.need.num_sequences * reservation.need.gives_way
        self.num_blocks -= reservation.num_blocks
        if reservation.reports_left == 0:
            self._see(reservation, -1)
        else:
            self.num_unseen_blocks -= reservation.num_blocks
        return reservation.need

    def _see(self, reservation: _Reservation, sign: int) -> None:
        need = reservation.need
        self.num_seen_sequences += sign * need.num_sequences
        self.num_seen_prompt_tokens += sign * need.num_sequences * need.num_prompt_tokens
        self.num_seen_output_tokens += sign * need.num_sequences * need.num_output_tokens


class RefusalBackoff:
    """What follows from a refusal: the engine takes no more of our requests than it had, until one ends or a pause is
    over.

    After the pause one request at a time tries again; each refusal in a row doubles the pause. This replaces what is
    unknown of an engine whose reports are stale, lag, or omit its limits.
    """

    def __init__(self) -> None:
        self._full_at: int | None = None
        """How many of our requests were there when it refused one more; `None`: it did not."""
        self._until = 0.0
        self._num_refusals = 0

    def refused(self, in_flight: int, now: float) -> None:
        """It refused one request while it had `in_flight` others of ours."""
        self._full_at = in_flight
        self._until = now + min(MAX_PAUSE_S, BASE_PAUSE_S * 2.0 ** min(self._num_refusals, 10))
        self._num_refusals += 1

    def accepted(self) -> None:
        self._full_at = None
        self._num_refusals = 0

    def allows(self, in_flight: int, now: float) -> bool:
        return self._full_at is None or in_flight < self._full_at or now >= self._until

    def chosen(self, in_flight: int, now: float) -> None:
        """A request goes there beside `in_flight` others: beyond the refused number, it is the one that tries again."""
        if self._full_at is not None and in_flight >= self._full_at:
            self._until = now + MAX_PAUSE_S
