"""The queue of one deployment: its waiting requests, its rate, and the errors for clients.

`admission.fair_queue` defines order and bounds, and `brain.queue.queues` wakes requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagemill_protocol.errors import PagemillError, unavailable
from pagemill_protocol.resource.served import QueueLimits
from pagemill_routing.admission.fair_queue import FairQueue, Waiter

HALF_LIFE_S = 20.0
LEAST_SECONDS = 0.5
"""Seconds with waiting requests that must be observed before the rate is used."""
UNKNOWN_WAIT_S = 5.0
MAX_WAIT_S = 120.0


class DrainRate:
    """The tokens that are served per second while requests wait, for `Retry-After` and for deadlines.

    Tokens and seconds decay with a half-life, so the rate follows a deployment that is scaled.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        """The time up to which waiting is counted; `None` while no request waits."""

    def watch(self, now: float, waiting: bool) -> None:
        """Count the time since the previous call, if requests waited then; `waiting`: whether requests wait now."""
        if self._since is not None and now > self._since:
            elapsed_s = now - self._since
            fading = 0.5 ** (elapsed_s / HALF_LIFE_S)
            self._tokens *= fading
            self._seconds = self._seconds * fading + elapsed_s
        self._since = now if waiting else None

    def served(self, cost_tokens: int) -> None:
        """Count a waiting request that got its turn."""
        self._tokens += cost_tokens

    @property
    def tokens_per_s(self) -> float | None:
        if self._seconds < LEAST_SECONDS or self._tokens <= 0:
            return None
        return self._tokens / self._seconds

    def wait_s(self, num_tokens: int) -> float | None:
        """Return the time until this many tokens are served; `None` while the rate is unknown."""
        rate = self.tokens_per_s
        return num_tokens / rate if rate is not None else None

    def retry_after_s(self, num_tokens: int, start_s: float | None = None) -> float:
        """Return `Retry-After` for a queue of this many tokens, whose engine starts in `start_s` if it is not None."""
        wait_s = self.wait_s(num_tokens)
        if wait_s is None and start_s is None:
            return UNKNOWN_WAIT_S
        return min(MAX_WAIT_S, max(1.0, (wait_s or 0.0) + (start_s or 0.0)))


@dataclass(slots=True, eq=False, kw_only=True)
class QueueEntry(Waiter):
    """A waiting request, with the function that tries to place it and the future for its result."""

    attempt: Callable[[], object | None]
    future: asyncio.Future[Any]
    entered_at: float
    deadline_at: float


class DeploymentQueue:
    """The waiting requests of one deployment."""

    def __init__(self, limits: QueueLimits, start_left_s: Callable[[], float | None]) -> None:
        self._start_left_s = start_left_s
        self.waiting: FairQueue[QueueEntry] = FairQueue(limits.max_requests, limits.max_bytes)
        self.drain = DrainRate()

    def set_limits(self, limits: QueueLimits) -> None:
        self.waiting.max_requests, self.waiting.max_bytes = limits.max_requests, limits.max_bytes

    def excess_wait_s(self, entry: QueueEntry) -> float | None:
        """Return the time that the request would wait, if it would miss its deadline, otherwise `None`."""
        if entry.deadline_at == math.inf or not len(self.waiting):
            return None
        num_tokens = self.waiting.tokens_before(entry.key, entry.priority, entry.cost_tokens)
        wait_s = self.drain.wait_s(num_tokens)
        return wait_s if wait_s is not None and entry.entered_at + wait_s > entry.deadline_at else None

    def retry_after_s(self) -> float:
        return self.drain.retry_after_s(self.waiting.num_tokens, self._start_left_s())

    def full(self) -> PagemillError:
        """Return the error 429 for a full queue."""
        return PagemillError(
            f"All engines of this model are busy and {len(self.waiting)} requests wait already, with "
            f"{self.waiting.num_bytes} bytes; at most {self.waiting.max_requests} and {self.waiting.max_bytes} may. "
            "Try again later.",
            status=429,
            type="rate_limit_error",
            code="queue_full",
            retry_after_s=self.retry_after_s(),
        )

    def timed_out(self, waited_s: float) -> PagemillError:
        """Return the error 503 for a request that waited too long."""
        return unavailable(
            f"All engines of this model are busy: the request waited {waited_s:.0f} s for its turn, the longest that "
            "is allowed. Try again later.",
            retry_after_s=self.retry_after_s(),
        )
