"""Bounded retry: how often one request may be tried, where not to go again, and what to say when it is over.

Failures are bounded; refusals by full engines are not, but after a few in a row the request waits in the queue first.

Pure bookkeeping of one request. Whether a failure may be retried at all is the relay's knowledge, which endpoint is
next the brain's.
"""

from __future__ import annotations

import random

from pagemill_protocol.errors import PagemillError, bad_upstream

RETRY_PAUSE_BASE_S = 0.05
RETRY_PAUSE_MAX_S = 2.0
MOST_FAILURES = 32
"""Of one request, although it went on each time: no engine can keep it."""


class Attempts:
    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._failed: list[str] = []
        """Endpoints that failed or take nothing, in order."""
        self._full: list[str] = []
        """Endpoints that were full, since the request last waited in the queue."""
        self._chosen = ""
        self._num_declined = 0
        self._num_failures = 0
        """Ever; `_failed` begins anew with each progress."""
        self._last_message = ""
        self.count = 0
        """Of tries, full engines included."""
        self.queued_s = 0.0

    @property
    def tried(self) -> frozenset[str]:
        return frozenset((*self._failed, *self._full))

    @property
    def num_counted(self) -> int:
        """Those that may have cost an engine something: it was not full, and took requests."""
        return len(self._failed) - self._num_declined

    @property
    def num_refusals(self) -> int:
        """By full engines, since the request last waited in the queue."""
        return len(self._full)

    @property
    def exhausted(self) -> bool:
        return self.num_counted >= self._max_attempts or self._num_failures >= MOST_FAILURES

    def queued(self, seconds: float) -> None:
        """The request waited for room: engines that were full may be asked again."""
        self.queued_s += seconds
        self._full.clear()

    def chose(self, endpoint_id: str) -> None:
        self._chosen = endpoint_id
        self.count += 1

    def progressed(self) -> None:
        """The engine chosen last brought the answer forward: what failed before it counts no more."""
        self._failed.clear()
        self._full.clear()
        self._num_declined = 0

    def refused(self, message: str) -> None:
        """The engine chosen last is full (429 or 503): it works, but not for this request now."""
        self._full.append(self._chosen)
        self._last_message = message

    def declined(self, message: str) -> None:
        """The engine chosen last takes nothing any more, or not yet, or nobody listens there: that does not count."""
        self._failed.append(self._chosen)
        self._num_failures += 1
        self._num_declined += 1
        self._last_message = message

    def broke(self, message: str) -> None:
        """The engine chosen last failed, or was lost: it may have had the request."""
        self._failed.append(self._chosen)
        self._num_failures += 1
        self._last_message = message

    def pause_s(self, next_endpoint_id: str) -> float:
        """How long to wait before the next try: nothing for another endpoint, a growing jittered pause for the same."""
        if next_endpoint_id not in self._failed:
            return 0.0
        pause_s = min(RETRY_PAUSE_MAX_S, RETRY_PAUSE_BASE_S * 2.0 ** len(self._failed))
        return pause_s * random.uniform(0.5, 1.0)

    def verdict(self) -> PagemillError:
        """The error for the client once no try is left."""
        return bad_upstream(f"No engine could serve the request after {self.count} attempts: {self._last_message}")
