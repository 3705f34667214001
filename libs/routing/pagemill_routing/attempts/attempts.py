"""Counts the attempts of one request: which endpoints to avoid, when to stop, and the final error.

Failures are limited. Refusals by full engines are not, but after a few in a row the request waits in the queue. An
engine that ended does not use up an attempt, because another engine must do its work; such ends have their own limit.

Pure bookkeeping. The relay decides whether a failure may be retried, and the brain chooses the next endpoint.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from pagemill_protocol.errors import PagemillError, bad_upstream

RETRY_PAUSE_BASE_S = 0.05
RETRY_PAUSE_MAX_S = 2.0
MAX_FAILED_ATTEMPTS = 32
"""Limit for the failures of one request, even if it made progress each time."""
MAX_ENDS = 8
"""Limit for the engines in a row that ended before they sent a token of the request."""
MAX_CRASHES = 5
"""Limit for the engines that crashed with the request, whether or not they sent tokens."""

MAX_FAULTS = 2
"""Limit for the working engines that failed the request alone: after the second one, the request is the cause."""
MAX_SILENCES = 3
"""Limit for the engines that fell silent with the request, whether or not they sent tokens before."""


class Attempts:
    def __init__(self, max_attempts: int, *, uniform: Callable[[float, float], float] = random.uniform) -> None:
        """`uniform` draws a random number between two bounds, for the pauses."""
        self._max_attempts = max_attempts
        self._uniform = uniform
        self._failed: list[str] = []
        """The endpoints that failed or accept no requests since the last progress, in order."""
        self._full: list[str] = []
        """The endpoints that were full since the request last waited in the queue."""
        self._chosen = ""
        self._num_free = 0
        """The entries of `_failed` that do not use up an attempt."""
        self._num_ends = 0
        """The engines that ended since the last token."""
        self._num_crashes = 0
        self._num_faults = 0
        self._num_silences = 0
        self._num_failures = 0
        """All failures; `_failed` is cleared with each progress."""
        self._last_message = ""
        self.count = 0
        """All attempts, including those that a full engine refused."""
        self.queued_s = 0.0

    @property
    def tried(self) -> frozenset[str]:
        return frozenset((*self._failed, *self._full))

    @property
    def num_counted(self) -> int:
        """The failures that use up an attempt: the endpoint was available and not full, and failed."""
        return len(self._failed) - self._num_free

    @property
    def num_refusals(self) -> int:
        """The refusals by full engines since the request last waited in the queue."""
        return len(self._full)

    @property
    def exhausted(self) -> bool:
        if self._num_ends >= MAX_ENDS or self._num_crashes >= MAX_CRASHES:
            return True
        if self._num_faults >= MAX_FAULTS or self._num_silences >= MAX_SILENCES:
            return True
        return self.num_counted >= self._max_attempts or self._num_failures >= MAX_FAILED_ATTEMPTS

    def queued(self, seconds: float) -> None:
        """Count time in the queue; engines that were full may be tried again."""
        self.queued_s += seconds
        self._full.clear()

    def record_choice(self, endpoint_id: str) -> None:
        self._chosen = endpoint_id
        self.count += 1

    def progressed(self) -> None:
        """Forget earlier failures, because the last engine continued the answer."""
        self._failed.clear()
        self._full.clear()
        self._num_free = self._num_ends = 0

    def refused(self, message: str) -> None:
        """Count a refusal: the last engine is full (429 or 503)."""
        self._full.append(self._chosen)
        self._last_message = message

    def record_decline(self, message: str) -> None:
        """Count a failure that uses up no attempt, because the last engine was not serving and took no request."""
        self._failed.append(self._chosen)
        self._num_failures += 1
        self._num_free += 1
        self._last_message = message

    def ended(self, message: str, *, crashed: bool) -> None:
        """Count an engine that ended with the request; `crashed`: by its own failure."""
        self._failed.append(self._chosen)
        self._num_failures += 1
        self._num_free += 1
        self._num_ends += 1
        self._num_crashes += crashed
        self._last_message = message

    def record_break(self, message: str, *, at_fault: bool = False, fell_silent: bool = False) -> None:
        """Count a failure of the last engine, which may have had the request.

        `at_fault`: the engine works and failed this request. `fell_silent`: it stopped sending.
        """
        self._num_faults += at_fault
        self._num_silences += fell_silent
        self._failed.append(self._chosen)
        self._num_failures += 1
        self._last_message = message

    def pause_s(self, next_endpoint_id: str) -> float:
        """Return the seconds to wait before the next attempt: 0 for another endpoint, else growing with jitter."""
        if next_endpoint_id not in self._failed:
            return 0.0
        pause_s = min(RETRY_PAUSE_MAX_S, RETRY_PAUSE_BASE_S * 2.0 ** len(self._failed))
        return pause_s * self._uniform(0.5, 1.0)

    def verdict(self) -> PagemillError:
        """Return the error for the client after the last attempt."""
        error = bad_upstream(f"No engine could serve the request after {self.count} attempts: {self._last_message}")
        error.is_final = self._num_faults >= MAX_FAULTS or self._num_crashes >= MAX_CRASHES
        return error
