"""The bounded fair queue of one deployment: which request is next, and which requests overload sheds.

The lowest value of `priority` is served first. Within a priority, start-time fair queueing by tokens gives each key
the same share, however many requests it sends; within a key, requests are served in order of arrival. Overload sheds
the newest request of the largest `priority` value, of the key with the largest part of the queue. It does not shed
requests that an engine has worked on: up to `MAX_KEPT` of them are kept beyond the queue's bounds.

Pure: no clock and no futures. `pagemill_routing.brain.queue.queues` checks the capacity for the next request and wakes
it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

MAX_START_TAGS = 4096
"""Limit for the keys without waiting requests whose virtual time is remembered, per priority."""
MAX_KEPT = 1000
"""Limit for requests that lost their engine and are never shed; further ones are treated like new requests."""


@dataclass(slots=True, eq=False)
class Waiter:
    """One waiting request."""

    key: str
    """The key that pays for the request's turn."""
    priority: int
    """Smaller values are served first."""
    cost_tokens: int
    """The cost of the request's turn; 0 if its key has already paid."""
    num_bytes: int
    arrived_at: float
    """Arrival at the gateway, not in the queue: a request that returns to the queue gets its old place."""
    expires_at: float
    group: str
    """Requests of a group need the same endpoints: if the first finds no capacity, the others need not be tried."""
    kept: bool = False
    """Whether overload must not shed the request, because it was admitted before and lost its engine."""

    def __lt__(self, other: Waiter) -> bool:
        return self.arrived_at < other.arrived_at


W = TypeVar("W", bound=Waiter)


@dataclass(slots=True)
class _KeyQueue(Generic[W]):
    """The waiting requests of one key, oldest first."""

    start: float
    """The virtual time at which the first request is due."""
    waiters: list[W] = field(default_factory=list)
    num_bytes: int = 0

    def newest(self) -> W | None:
        """Return the newest request that overload may shed, or `None`."""
        return next((waiter for waiter in reversed(self.waiters) if not waiter.kept), None)

    def weight(self, by_requests: bool) -> int:
        """Return the key's part of the queue, in requests or bytes."""
        return len(self.waiters) if by_requests else self.num_bytes


class _PriorityLevel(Generic[W]):
    """All keys of one priority. Deleted with its last request: fairness is between requests that wait together."""

    def __init__(self) -> None:
        self.lines: dict[str, _KeyQueue[W]] = {}
        self._now = 0.0
        self._start_tags: dict[str, float] = {}
        """The virtual times at which keys without waiting requests are due again."""

    def add(self, waiter: W) -> None:
        line = self.lines.get(waiter.key)
        if line is None:
            start = max(self._now, self._start_tags.pop(waiter.key, 0.0))
            line = self.lines[waiter.key] = _KeyQueue(start)
        insort(line.waiters, waiter)
        line.num_bytes += waiter.num_bytes

    def remove(self, waiter: W) -> None:
        line = self.lines[waiter.key]
        line.waiters.remove(waiter)
        line.num_bytes -= waiter.num_bytes
        if not line.waiters:
            del self.lines[waiter.key]
            self._remember(waiter.key, line.start)

    def take(self, waiter: W) -> None:
        """Remove a request that got its turn, and charge its key."""
        line = self.lines[waiter.key]
        self._now = max(self._now, line.start)
        line.start += waiter.cost_tokens
        self.remove(waiter)

    def settle(self, key: str, num_tokens: int) -> None:
        """Charge a key the difference between the cost of a turn and what it paid, which may be negative."""
        line = self.lines.get(key)
        if line is not None:
            line.start = max(self._now, line.start + num_tokens)
        else:
            self._remember(key, max(self._now, self._start_tags.pop(key, self._now)) + num_tokens)

    def _remember(self, key: str, start: float) -> None:
        if start <= self._now:
            return
        self._start_tags[key] = start
        if len(self._start_tags) > MAX_START_TAGS:
            self._start_tags = {each: due for each, due in self._start_tags.items() if due > self._now}
        if len(self._start_tags) > MAX_START_TAGS:
            self._start_tags = dict(list(self._start_tags.items())[MAX_START_TAGS // 2 :])


class FairQueue(Generic[W]):
    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self._levels: dict[int, _PriorityLevel[W]] = {}
        self._waiters: dict[W, None] = {}
        self._num_bytes = 0
        self._num_tokens = 0
        self._num_kept = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, waiter: W) -> bool:
        return waiter in self._waiters

    def __iter__(self) -> Iterator[W]:
        return iter(self._waiters)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_tokens(self) -> int:
        """The cost of all waiting requests."""
        return self._num_tokens

    def oldest_arrival(self) -> float | None:
        return min((waiter.arrived_at for waiter in self._waiters), default=None)

    def add(self, waiter: W) -> list[W]:
        """Add a request. Return the requests that were shed for it: others, or the new one itself."""
        waiter.kept = waiter.kept and self._num_kept < MAX_KEPT
        self._insert(waiter)
        gone: list[W] = []
        while self._exceeds_limits() and (victim := self._victim()) is not None:
            self.remove(victim)
            if victim is waiter:
                # The new request is refused, so the others need not be shed.
                for each in gone:
                    self._insert(each)
                return [waiter]
            gone.append(victim)
        return gone

    def remove(self, waiter: W) -> None:
        """Remove a request that waits no longer and had no turn."""
        if waiter not in self._waiters:
            return
        band = self._levels[waiter.priority]
        band.remove(waiter)
        self._forget(waiter, band)

    def first(self, blocked: Collection[str] = ()) -> W | None:
        """Return the next request, or `None`. Keys whose first request has a group in `blocked` are skipped."""
        for priority in sorted(self._levels):
            lines = [each for each in self._levels[priority].lines.values() if each.waiters[0].group not in blocked]
            if lines:
                return min(lines, key=_turn).waiters[0]
        return None

    def take(self, waiter: W) -> None:
        """Remove a request that got its turn, and charge its key. It must be the first of its key."""
        band = self._levels[waiter.priority]
        band.take(waiter)
        self._forget(waiter, band)

    def settle(self, key: str, priority: int, num_tokens: int) -> None:
        """Charge a key the difference to the cost of a turn, which may be negative; ignored for an empty priority."""
        band = self._levels.get(priority)
        if band is not None:
            band.settle(key, num_tokens)

    def expired(self, now: float) -> list[W]:
        return [waiter for waiter in self._waiters if waiter.expires_at <= now]

    def tokens_before(self, key: str, priority: int, cost_tokens: int) -> int:
        """Return the tokens that are served before a new request, if no other request arrives after it."""
        band = self._levels.get(priority)
        line = band.lines.get(key) if band is not None else None
        own = sum(waiter.cost_tokens for waiter in line.waiters) if line is not None else 0
        return own + self._before(key, priority, own + cost_tokens)

    def tokens_until(self, arrived_at: float) -> int:
        """Return the tokens that are served until the end of the turn of the request that arrived at this time.

        Assumes that no other request arrives. 0 if there is no such request.
        """
        for priority, band in self._levels.items():
            for key, line in band.lines.items():
                places = [place for place, waiter in enumerate(line.waiters) if waiter.arrived_at == arrived_at]
                if places:
                    own = sum(waiter.cost_tokens for waiter in line.waiters[: places[0] + 1])
                    return self._before(key, priority, own) + own
        return 0

    def _before(self, key: str, priority: int, own: int) -> int:
        """Return the tokens of other keys and of smaller priorities that are served before `own` tokens of this key."""
        total = 0
        for each, band in self._levels.items():
            if each > priority:
                continue
            for name, line in band.lines.items():
                tokens = sum(waiter.cost_tokens for waiter in line.waiters)
                if each < priority:
                    total += tokens
                elif name != key:
                    total += min(tokens, own)
        return total

    def _insert(self, waiter: W) -> None:
        self._levels.setdefault(waiter.priority, _PriorityLevel()).add(waiter)
        self._waiters[waiter] = None
        self._num_bytes += waiter.num_bytes
        self._num_tokens += waiter.cost_tokens
        self._num_kept += waiter.kept

    def _forget(self, waiter: W, band: _PriorityLevel[W]) -> None:
        if not band.lines:
            del self._levels[waiter.priority]
        del self._waiters[waiter]
        self._num_bytes -= waiter.num_bytes
        self._num_tokens -= waiter.cost_tokens
        self._num_kept -= waiter.kept

    def _exceeds_limits(self) -> bool:
        return len(self._waiters) > self.max_requests or self._num_bytes > self.max_bytes

    def _victim(self) -> W | None:
        """Return the request to shed when the queue exceeds its bounds; `None` if none may be shed."""
        is_too_long = len(self._waiters) > self.max_requests
        for priority in sorted(self._levels, reverse=True):
            newest = [(line, waiter) for line in self._levels[priority].lines.values() if (waiter := line.newest())]
            if newest:
                return max(newest, key=lambda each: (each[0].weight(is_too_long), each[1].arrived_at))[1]
        return None

    def find_inconsistencies(self) -> list[str]:
        """Return the contradictions between counters and contents, for tests. O(waiters)."""
        lines = list(chain.from_iterable(band.lines.items() for band in self._levels.values()))
        there = [waiter for _, line in lines for waiter in line.waiters]
        checks = {
            "a line is empty": all(line.waiters for _, line in lines),
            "a line is out of order": all(line.waiters == sorted(line.waiters) for _, line in lines),
            "lines and waiters disagree": set(there) == set(self._waiters) and len(there) == len(self._waiters),
            "bytes are miscounted": self._num_bytes == sum(waiter.num_bytes for waiter in there),
            "tokens are miscounted": self._num_tokens == sum(waiter.cost_tokens for waiter in there),
            "a line's bytes are miscounted": all(
                line.num_bytes == sum(waiter.num_bytes for waiter in line.waiters) for _, line in lines
            ),
            "those that are kept are miscounted": self._num_kept == sum(waiter.kept for waiter in there) <= MAX_KEPT,
            "it is overfull": not self._exceeds_limits() or all(waiter.kept for waiter in there),
        }
        return [fault for fault, holds in checks.items() if not holds]


def _turn(line: _KeyQueue[W]) -> tuple[float, float]:
    return line.start, line.waiters[0].arrived_at
