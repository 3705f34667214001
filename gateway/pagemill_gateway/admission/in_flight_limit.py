"""Limits the requests inside the gateway: at most `max_requests` at a time, with `max_bytes` of bodies.

The gate protects the gateway's memory, not the engines, which accept or refuse requests themselves. It has no queue: a
request beyond the limits is refused with `Retry-After`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from pagemill_protocol.errors import PagemillError, deadline_exceeded, unavailable


class InFlightLimit:
    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._num_in_flight = 0
        self._num_admitted = 0
        self._num_bytes = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._closed_reason: str | None = None

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def num_bytes(self) -> int:
        """The bytes of the bodies of all requests inside."""
        return self._num_bytes

    def close(self, reason: str) -> None:
        """Refuse all further requests with 503 and `reason`; requests inside stay."""
        self._closed_reason = reason

    @contextmanager
    def enter(self) -> Iterator[InFlightSlot]:
        """Hold a slot for the body of the `with`. Raises `PagemillError` (503) at once if there is none."""
        if self._closed_reason is not None:
            raise unavailable(self._closed_reason, retry_after_s=1, code="draining")
        if self._num_in_flight >= self._max_requests:
            raise unavailable(
                f"The gateway already serves {self._num_in_flight} requests, its limit. Try again shortly.",
                retry_after_s=1,
            )
        self._num_in_flight += 1
        self._num_admitted += 1
        self._empty.clear()
        slot = InFlightSlot(self)
        try:
            yield slot
        finally:
            self._num_bytes -= slot.num_bytes
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._empty.set()

    async def wait_empty(self) -> None:
        """Return when no request is inside."""
        await self._empty.wait()

    async def wait_idle(self, idle_s: float) -> None:
        """Return when no request is inside and none has arrived for `idle_s`."""
        while True:
            await self._empty.wait()
            num_entered = self._num_admitted
            await asyncio.sleep(idle_s)
            if self._num_admitted == num_entered:
                return

    def has_capacity(self, num_bytes: int) -> bool:
        return self._num_bytes + num_bytes <= self._max_bytes

    def take(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes

    def over_capacity(self) -> PagemillError:
        return unavailable(
            f"The gateway holds {self._num_bytes} bytes of request bodies and its limit is {self._max_bytes}. "
            "Try again shortly, or send less text in one request.",
            retry_after_s=1,
        )


class InFlightSlot:
    """The slot of one request and the bytes of its body."""

    def __init__(self, limit: InFlightLimit) -> None:
        self._limit = limit
        self.num_bytes = 0

    def expect(self, num_bytes: int) -> None:
        """Raise `PagemillError` (503) if a body of this length would exceed the limit. Reserves nothing."""
        if not self._limit.has_capacity(num_bytes):
            raise self._limit.over_capacity()

    def hold(self, num_bytes: int) -> None:
        """Count received bytes. Raises `PagemillError` (503), and counts nothing, if they exceed the limit."""
        self.expect(num_bytes)
        self._limit.take(num_bytes)
        self.num_bytes += num_bytes


class RunningRequests:
    """The requests in progress. Each has a deadline, and all can be ended when the drain timeout is over."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self._ending = False

    def limited(self, timeout_s: float | None) -> RunningRequest:
        """Return a context manager that ends its block after `timeout_s` or at `cancel_all`, by `PagemillError`."""
        return RunningRequest(self._limits, asyncio.timeout(0 if self._ending else timeout_s), self._cause)

    def cancel_all(self) -> None:
        """End all blocks now, and every later one at once."""
        self._ending = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            # An expired timeout cannot be rescheduled; its block is already ending.
            if not limit.expired():
                limit.reschedule(now)

    def _cause(self) -> PagemillError:
        if self._ending:
            return unavailable("The gateway is shutting down and cut the answer short.", 1, code="draining")
        return deadline_exceeded()


class RunningRequest:
    """The asynchronous context manager that `RunningRequests.limited` returns."""

    def __init__(
        self, limits: set[asyncio.Timeout], limit: asyncio.Timeout, cause: Callable[[], PagemillError]
    ) -> None:
        self._limits = limits
        self._limit = limit
        self._cause = cause

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._limits.add(self._limit)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._limits.discard(self._limit)
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            raise self._cause() from None
        if isinstance(error, TimeoutError) and self._limit.expired():
            raise self._cause() from None
