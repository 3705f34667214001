"""Limits the requests inside the gateway: at most `max_requests` at a time, with `max_bytes` of memory.

A request's bytes are those of its body and of what it becomes, and those of its answer that the client has not read.
Both amounts are limited in all and for each tenant (`shares`). The limit protects the gateway's memory and each tenant
from the others, not the engines, which accept or refuse requests themselves. It has no queue: a request beyond the
limits is refused with `Retry-After`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from pagemill_protocol.errors import PagemillError, deadline_exceeded, unavailable
from pagemill_protocol.shares import RETRY_S, SharedLimit, share_exceeded


class InFlightLimit:
    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._requests = SharedLimit(max_requests)
        self.bytes = SharedLimit(max_bytes)
        """The bytes of all requests inside, for the slots."""
        self._unread: dict[str, dict[UnreadAnswer, None]] = {}
        """The answers of each tenant whose clients do not read them now, the longest waiting first."""
        self._num_admitted = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._closed_reason: str | None = None

    @property
    def num_in_flight(self) -> int:
        return self._requests.used

    @property
    def num_bytes(self) -> int:
        """The bytes of all requests inside."""
        return self.bytes.used

    def close(self, reason: str) -> None:
        """Refuse all further requests with 503 and `reason`; requests inside stay."""
        self._closed_reason = reason

    @contextmanager
    def enter(self, tenant: str = "") -> Iterator[InFlightSlot]:
        """Hold a slot of `tenant` for the body of the `with`. Raises `PagemillError` (429, 503) if there is none."""
        slot = self.take_slot(tenant)
        try:
            yield slot
        finally:
            slot.leave()

    def take_slot(self, tenant: str) -> InFlightSlot:
        """Return a slot, whose `leave` must be called. Raises `PagemillError` (429, 503) if there is none."""
        if self._closed_reason is not None:
            raise unavailable(self._closed_reason, retry_after_s=1, code="draining")
        if not self._requests.take(tenant, 1):
            raise self._no_slot(tenant)
        self._num_admitted += 1
        self._empty.clear()
        return InFlightSlot(self, tenant)

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

    # Calls of the slots.

    def left(self, tenant: str, num_bytes: int) -> None:
        if num_bytes:
            self.bytes.release(tenant, num_bytes)
        self._requests.release(tenant, 1)
        if self._requests.used == 0:
            self._empty.set()

    def unread_of(self, tenant: str) -> dict[UnreadAnswer, None]:
        return self._unread.setdefault(tenant, {})

    def forget_unread(self, answer: UnreadAnswer) -> None:
        answers = self._unread.get(answer.tenant, {})
        answers.pop(answer, None)
        if not answers:
            self._unread.pop(answer.tenant, None)

    def over_capacity(self, tenant: str, num_bytes: int) -> PagemillError:
        used, limit, own = self.bytes.used, self.bytes.limit, self.bytes.used_by(tenant)
        if _is_own_doing(self.bytes, tenant, num_bytes):
            return share_exceeded(
                f"Your running requests hold {own} bytes of the gateway's memory, with their bodies and unread "
                "answers, and the rest is for others. Try again shortly, send less text at once, or read answers "
                "faster."
            )
        return unavailable(
            f"The gateway holds {used} bytes of requests and their unread answers, and its limit is {limit} (the "
            "gateway's setting max_in_flight_body_bytes). Try again shortly, or send less text in one request.",
            retry_after_s=RETRY_S,
        )

    def _no_slot(self, tenant: str) -> PagemillError:
        used, limit, own = self._requests.used, self._requests.limit, self._requests.used_by(tenant)
        if _is_own_doing(self._requests, tenant, 1):
            return share_exceeded(
                f"You have {own} requests in the gateway, and the rest of its {limit} is for others. Wait until some "
                "of them have ended."
            )
        return unavailable(
            f"The gateway already serves {used} requests, its limit (its setting max_requests). Try again shortly.",
            retry_after_s=RETRY_S,
        )


def _is_own_doing(shared: SharedLimit, tenant: str, amount: int) -> bool:
    """Whether a refusal is for the tenant's share, or the tenant has at least half of what is used."""
    return bool(tenant) and (shared.used + amount <= shared.limit or 2 * shared.used_by(tenant) >= shared.used)


class InFlightSlot:
    """The slot of one request and the bytes that it holds."""

    def __init__(self, limit: InFlightLimit, tenant: str) -> None:
        self._limit = limit
        self._bytes = limit.bytes
        self._tenant = tenant
        self.num_bytes = 0

    def leave(self) -> None:
        """Give back the slot and its bytes."""
        self._limit.left(self._tenant, self.num_bytes)
        self.num_bytes = 0

    @property
    def max_bytes(self) -> int:
        """The limit for all requests."""
        return self._bytes.limit

    def resize(self, num_bytes: int) -> None:
        """Count this many bytes in place of all that were counted. Raises `PagemillError` like `hold`."""
        if num_bytes > self.num_bytes:
            self.hold(num_bytes - self.num_bytes)
        else:
            self.release(self.num_bytes - num_bytes)

    def expect(self, num_bytes: int) -> None:
        """Raise `PagemillError` (429, 503) if this many bytes would exceed the limit. Reserves nothing."""
        if not self._bytes.has_room(self._tenant, num_bytes):
            raise self._limit.over_capacity(self._tenant, num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Count bytes. Raises `PagemillError` (429, 503), and counts nothing, if they exceed the limit."""
        if not self._bytes.take(self._tenant, num_bytes):
            raise self._limit.over_capacity(self._tenant, num_bytes)
        self.num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Count bytes that are held no longer."""
        self._bytes.release(self._tenant, num_bytes)
        self.num_bytes -= num_bytes

    @contextmanager
    def unread(self, num_bytes: int, end: Callable[[], None]) -> Iterator[None]:
        """Count the bytes that wait for a client which does not read, for the body of the `with`.

        If they exceed the limit, the answers of the same tenant that have waited longest are ended by calling their
        `end`, and finally this one by its own.
        """
        answer = UnreadAnswer(self._tenant, end)
        limit, waiting = self._limit, self._limit.unread_of(self._tenant)
        waiting[answer] = None
        try:
            while not self._bytes.take(self._tenant, num_bytes):
                oldest = next(iter(waiting))
                oldest.finish(limit)
                if oldest is answer:
                    break
            else:
                answer.num_bytes = num_bytes
            yield
        finally:
            answer.leave(limit)


class UnreadAnswer:
    """The bytes of one answer that wait for its client."""

    def __init__(self, tenant: str, end: Callable[[], None]) -> None:
        self.tenant = tenant
        self.num_bytes = 0
        self._end = end

    def finish(self, limit: InFlightLimit) -> None:
        """End the answer, whose memory is free as soon as this turn of the event loop is over."""
        self.leave(limit)
        self._end()

    def leave(self, limit: InFlightLimit) -> None:
        limit.bytes.release(self.tenant, self.num_bytes)
        self.num_bytes = 0
        limit.forget_unread(self)


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
