"""Counts the requests that this gateway has sent to one engine and that the engine's reports do not show yet.

A request is reserved when it is sent, with the bytes of its uncached prompt and of its expected output. When the
engine has accepted it and sent two reports since, the reports include its bytes, and only the expected growth of its
output stays reserved. Pure bookkeeping of one engine; `brain.endpoints.record` checks capacity with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagemill_protocol.report.cache_kinds import CacheKind, needed_bytes

REPORTS_UNTIL_COUNTED = 2
"""Reports after the acceptance until a request counts as reported; the engine may have made the first one before."""
BASE_PAUSE_S = 0.25
MAX_PAUSE_S = 4.0
LOGPROBS_PER_TOKEN = 10
"""How many log probabilities cost as much as one token: preparing and rendering one takes a tenth of a token's CPU."""


class CapacityNeed(msgspec.Struct, frozen=True, gc=False):
    """The capacity of an engine that one request needs."""

    num_prompt_tokens: int
    num_uncached_tokens: int
    num_output_tokens: int
    """The expected output tokens of each sequence."""
    num_sequences: int = 1
    max_tokens: int | None = None
    is_low_priority: bool = False
    """Whether it leaves sequence slots to more urgent requests, as lines of batches do."""
    num_logprobs: int = 0
    """The log probabilities beside that of each output token."""

    @property
    def cost_tokens(self) -> int:
        """The cost of its turn in a queue, in tokens."""
        return self.cost_with(self.num_sequences * self.num_output_tokens)

    def cost_with(self, num_output_tokens: int) -> int:
        """Return the cost if all sequences together have this many tokens."""
        num_for_logprobs = num_output_tokens * self.num_logprobs // LOGPROBS_PER_TOKEN
        return self.num_uncached_tokens + num_output_tokens + num_for_logprobs

    def with_cached(self, num_cached_tokens: int) -> CapacityNeed:
        """Return the need if this many prompt tokens are cached; at least one token is computed."""
        return msgspec.structs.replace(self, num_uncached_tokens=max(1, self.num_prompt_tokens - num_cached_tokens))

    def num_bytes(self, block_size: int, kinds: Sequence[CacheKind]) -> int:
        """Return the bytes in an engine's cache of these kinds: the sequences share the blocks of the prompt and have
        their own for the output."""
        num_prompt, num_output, num_sequences = self.num_uncached_tokens, self.num_output_tokens, self.num_sequences
        num_blocks = -(-num_prompt // block_size) + num_sequences * -(-num_output // block_size)
        return needed_bytes(kinds, num_blocks, num_sequences, num_prompt + num_output, block_size)


class _Reservation(msgspec.Struct):
    need: CapacityNeed
    num_bytes: int
    reports_left: int | None = None
    """The reports until its bytes count as reported; `None` before the engine has accepted the request."""


class Reservations:
    def __init__(self) -> None:
        self._open: dict[int, _Reservation] = {}
        self._accepted: dict[int, _Reservation] = {}
        """The accepted requests that do not count as reported yet."""
        self.num_sequences = 0
        """The sequences of all requests at the engine."""
        self.num_low_priority_sequences = 0
        self.num_bytes = 0
        """The bytes of all requests at the engine, expected output included."""
        self.num_unreported_bytes = 0
        """The bytes of the requests that do not count as reported yet."""
        self.num_reported_sequences = 0
        self.num_reported_prompt_tokens = 0
        """Prompt tokens of reported requests, counted for each sequence, as engines count contexts."""
        self.num_reported_output_tokens = 0
        """Expected output tokens of reported requests."""

    def __len__(self) -> int:
        return len(self._open)

    def reserve(self, decision: int, need: CapacityNeed, num_bytes: int) -> None:
        reservation = self._open[decision] = _Reservation(need, num_bytes)
        self.num_sequences += need.num_sequences
        self.num_low_priority_sequences += need.num_sequences * need.is_low_priority
        self.num_bytes += reservation.num_bytes
        self.num_unreported_bytes += reservation.num_bytes

    def accepted(self, decision: int) -> None:
        """Note that the engine has accepted the request."""
        reservation = self._open.get(decision)
        if reservation is not None and reservation.reports_left is None:
            reservation.reports_left = REPORTS_UNTIL_COUNTED
            self._accepted[decision] = reservation

    def reported(self) -> None:
        """Note that a report has arrived."""
        for decision, reservation in list(self._accepted.items()):
            assert reservation.reports_left is not None
            reservation.reports_left -= 1
            if reservation.reports_left == 0:
                del self._accepted[decision]
                self._count(reservation, 1)
                self.num_unreported_bytes -= reservation.num_bytes

    def release(self, decision: int) -> CapacityNeed | None:
        """Remove a request that left the engine. Return its need, or `None` if it is unknown."""
        reservation = self._open.pop(decision, None)
        if reservation is None:
            return None
        self._accepted.pop(decision, None)
        self.num_sequences -= reservation.need.num_sequences
        self.num_low_priority_sequences -= reservation.need.num_sequences * reservation.need.is_low_priority
        self.num_bytes -= reservation.num_bytes
        if reservation.reports_left == 0:
            self._count(reservation, -1)
        else:
            self.num_unreported_bytes -= reservation.num_bytes
        return reservation.need

    def _count(self, reservation: _Reservation, sign: int) -> None:
        need = reservation.need
        self.num_reported_sequences += sign * need.num_sequences
        self.num_reported_prompt_tokens += sign * need.num_sequences * need.num_prompt_tokens
        self.num_reported_output_tokens += sign * need.num_sequences * need.num_output_tokens


class RefusalBackoff:
    """Limits the requests to an engine that refused one: no more than it had then, until one ends or a pause is over.

    After the pause one request at a time tries again; each refusal in a row doubles the pause. This protects engines
    whose reports are stale, late, or without limits.
    """

    def __init__(self) -> None:
        self._full_at: int | None = None
        """The number of our requests at the engine when it refused another; `None` if it accepted the last one."""
        self._until = 0.0
        self._num_refusals = 0

    def refused(self, in_flight: int, now: float) -> None:
        """Note a refusal by the engine while it had `in_flight` of our requests."""
        self._full_at = in_flight
        self._until = now + min(MAX_PAUSE_S, BASE_PAUSE_S * 2.0 ** min(self._num_refusals, 10))
        self._num_refusals += 1

    def accepted(self) -> None:
        self._full_at = None
        self._num_refusals = 0

    def allows(self, in_flight: int, now: float) -> bool:
        return self._full_at is None or in_flight < self._full_at or now >= self._until

    def chosen(self, in_flight: int, now: float) -> None:
        """Note a request that is sent next to `in_flight` others; beyond the limit it is the one that tries again."""
        if self._full_at is not None and in_flight >= self._full_at:
            self._until = now + MAX_PAUSE_S
