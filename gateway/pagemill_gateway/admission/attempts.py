"""Bounded retry: how often one request may be tried, where not to go again, and what to say when it is over.

Pure bookkeeping of one request. Whether a failure may be retried at all (nothing delivered yet) is the relay's
knowledge; which endpoint is next is the brain's.
"""

from __future__ import annotations

import random

from pagemill_protocol.errors import PagemillError, bad_upstream, unavailable

RETRY_PAUSE_BASE_S = 0.05


class Attempts:
    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._tried: list[str] = []
        self._refused_by: set[str] = set()
        self._num_declined = 0
        self._retry_after_s = 1.0
        self._last_message = ""

    @property
    def tried(self) -> frozenset[str]:
        return frozenset(self._tried)

    @property
    def count(self) -> int:
        return len(self._tried)

    @property
    def num_counted(self) -> int:
        return len(self._tried) - self._num_declined

    @property
    def exhausted(self) -> bool:
        return self.num_counted >= self._max_attempts

    def chose(self, endpoint_id: str) -> None:
        self._tried.append(endpoint_id)

    def pointless(self, endpoint_id: str) -> bool:
        """Whether the endpoint already said that it is full: asking again at once would only add to its load."""
        return endpoint_id in self._refused_by

    def refused(self, message: str, retry_after_s: float | None) -> None:
        """The engine chosen last is full (429 or 503): it works, but not for this request now."""
        self._refused_by.add(self._tried[-1])
        self._retry_after_s = max(self._retry_after_s, retry_after_s or 0.0)
        self._last_message = message

    def declined(self, message: str) -> None:
        """The engine chosen last takes nothing any more, or not yet: asking it cost nothing and does not count."""
        self._num_declined += 1
        self._last_message = message

    def broke(self, message: str) -> None:
        """The engine chosen last could not be reached, or failed."""
        self._last_message = message

    def pause_s(self, next_endpoint_id: str) -> float:
        """How long to wait before the next try: nothing for another endpoint, a growing jittered pause for the same."""
        if next_endpoint_id not in self._tried:
            return 0.0
        return RETRY_PAUSE_BASE_S * 2.0 ** len(self._tried) * random.uniform(0.5, 1.0)

    def verdict(self) -> PagemillError:
        """The error for the client once no try is left: 503 when engines were merely full, else 502."""
        if self._refused_by:
            return unavailable(
                f"All engines of this model are busy: {self._last_message} Try again later.",
                retry_after_s=self._retry_after_s,
            )
        return bad_upstream(f"No engine could serve the request after {self.count} attempts: {self._last_message}")
