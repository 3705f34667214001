"""Bounded retry: how often one request may be tried, which endpoints to avoid, and the error when no try is left.

Failures are bounded; refusals by full engines are not, but after a few in a row the request waits in the queue first.
An engine that ended costs no try, since another engine has to do its work; such ends have a bound of their own.

Pure bookkeeping of one request. Whether a failure may be retried at all is decided by the relay, which endpoint is next
by the brain.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from pagemill_protocol.errors import PagemillError, bad_upstream

RETRY_PAUSE_BASE_S = 0.05
RETRY_PAUSE_MAX_S = 2.0
MOST_FAILURES = 32
"""Of one request, even if it progressed each time: no engine can serve it."""
MOST_ENDS = 8
"""Engines in a row that ended with the request before it got a token of them, for whatever reason."""
MOST_CRASHES = 5
"""Engines whose own work failed while they had the request, also with tokens between."""


class Attempts:
    def __init__(self, max_attempts: int, *, uniform: Callable[[float, float], float] = random.uniform) -> None:
        """`uniform` draws a number between two, for the pauses."""
        self._max_attempts = max_attempts
        self._uniform = uniform
        self._failed: list[str] = []
        """Endpoints that failed or take no requests, in order."""
        self._full: list[str] = []
        """Endpoints that were full, since the request last waited in the queue."""
        self._chosen = ""
        self._num_free = 0
        """Of `_failed`: those that cost no try."""
        self._num_ends = 0
        """Since the last token."""
        self._num_crashes = 0
        self._num_failures = 0
        """Since the beginning; `_failed` is cleared with each progress."""
        self._last_message = ""
        self.count = 0
        """Tries, full engines included."""
        self.queued_s = 0.0

    @property
    def tried(self) -> frozenset[str]:
        return frozenset((*self._failed, *self._full))

    @property
    def num_counted(self) -> int:
        """Failed endpoints that cost a try: they were available and not full, and did not serve the request."""
        return len(self._failed) - self._num_free

    @property
    def num_refusals(self) -> int:
        """By full engines, since the request last waited in the queue."""
        return len(self._full)

    @property
    def exhausted(self) -> bool:
        if self._num_ends >= MOST_ENDS or self._num_crashes >= MOST_CRASHES:
            return True
        return self.num_counted >= self._max_attempts or self._num_failures >= MOST_FAILURES

    def queued(self, seconds: float) -> None:
        """The request waited for capacity: engines that were full may be asked again."""
        self.queued_s += seconds
        self._full.clear()

    def chose(self, endpoint_id: str) -> None:
        self._chosen = endpoint_id
        self.count += 1

    def progressed(self) -> None:
        """The engine chosen last continued the answer: earlier failures do not count any more."""
        self._failed.clear()
        self._full.clear()
        self._num_free = self._num_ends = 0

    def refused(self, message: str) -> None:
        """The engine chosen last is full (429 or 503): it works, but not for this request now."""
        self._full.append(self._chosen)
        self._last_message = message

    def declined(self, message: str) -> None:
        """The engine chosen last takes no requests any more, or not yet, or no process listens there, or it was gone
        before it took the request: that costs no try.
        """
        self._failed.append(self._chosen)
        self._num_failures += 1
        self._num_free += 1
        self._last_message = message

    def ended(self, message: str, *, crashed: bool) -> None:
        """The engine chosen last has ended, and its work for the request is lost; `crashed`: by its own failure."""
        self._failed.append(self._chosen)
        self._num_failures += 1
        self._num_free += 1
        self._num_ends += 1
        self._num_crashes += crashed
        self._last_message = message

    def broke(self, message: str) -> None:
        """The engine chosen last failed or sends nothing any more: it may have had the request."""
        self._failed.append(self._chosen)
        self._num_failures += 1
        self._last_message = message

    def pause_s(self, next_endpoint_id: str) -> float:
        """How long to wait before the next try: nothing for another endpoint, a growing jittered pause for the same."""
        if next_endpoint_id not in self._failed:
            return 0.0
        pause_s = min(RETRY_PAUSE_MAX_S, RETRY_PAUSE_BASE_S * 2.0 ** len(self._failed))
        return pause_s * self._uniform(0.5, 1.0)

    def verdict(self) -> PagemillError:
        """The error for the client when no try is left."""
        return bad_upstream(f"No engine could serve the request after {self.count} attempts: {self._last_message}")
