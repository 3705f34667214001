"""The store of one gateway, which counts in memory and loses its counts with the process.

`redis` counts for several gateways, and falls back to this store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagemill_gateway.limits.periods import Calendar, Periods
from pagemill_gateway.limits.store import (
    BUCKET_MS,
    WINDOW_BUCKETS,
    ExtensionRequest,
    Level,
    Reason,
    ReservationAnswer,
    ReservationRequest,
    Use,
    UseReport,
    amount_of,
)
from pagemill_servers.keys.caller import Limits

CONCURRENCY_RETRY_S = 1.0
"""The end of a sequence is unknown; requests take seconds."""
BEYOND_SHARE_RETRY_S = 5.0
"""For a request that exceeds this gateway's share while Redis is unavailable, but perhaps not the whole limit."""


class MinuteWindow:
    """The use within the last minute, in buckets of a second. `redis/reserve.lua` computes the same.

    A bucket counts until a minute after its end, up to a second longer than needed, so that no minute exceeds its
    limit, whenever it begins.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        """The amounts by the bucket's number, oldest first."""
        self.used = 0

    def forget_old(self, now_ms: int) -> None:
        oldest = now_ms // BUCKET_MS - WINDOW_BUCKETS + 1
        while self._buckets and (first := next(iter(self._buckets))) < oldest:
            self.used -= self._buckets.pop(first)

    def wait_ms(self, amount: int, limit: int, now_ms: int) -> int:
        """Return the time until `amount` fits, 0 if it fits now. `amount` must not exceed `limit`."""
        excess = self.used + amount - limit
        if excess <= 0:
            return 0
        for bucket, used in self._buckets.items():
            excess -= used
            if excess <= 0:
                return _gone_ms(bucket) - now_ms
        raise AssertionError("more was asked than the limit")

    def add(self, amount: int, now_ms: int) -> int:
        """Add an amount; return the number of its bucket."""
        bucket = now_ms // BUCKET_MS
        self._buckets[bucket] = self._buckets.get(bucket, 0) + amount
        self.used += amount
        return bucket

    def correct(self, bucket: int, difference: int, now_ms: int) -> None:
        """Correct an amount that was added to `bucket`: subtract from that bucket, or add to the current one."""
        self.forget_old(now_ms)
        if difference > 0:
            self.add(difference, now_ms)
        elif bucket in self._buckets:
            self._buckets[bucket] += difference
            self.used += difference

    def level(self, limit: int, now_ms: int) -> Level:
        last = next((bucket for bucket in reversed(self._buckets) if self._buckets[bucket]), None)
        reset_ms = 0 if last is None else _gone_ms(last) - now_ms
        return Level(limit, max(0, limit - self.used), reset_ms / 1000)


def _gone_ms(bucket: int) -> int:
    return (bucket + WINDOW_BUCKETS) * BUCKET_MS


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


@dataclass(slots=True)
class _Budget:
    """The tokens used in the current day or month."""

    period: str = ""
    used: int = 0

    def enter(self, period: str) -> None:
        if period != self.period:
            self.period, self.used = period, 0

    def correct(self, period: str, difference: int) -> None:
        if period == self.period:
            self.used += difference


@dataclass(slots=True)
class _Account:
    requests: MinuteWindow = field(default_factory=MinuteWindow)
    tokens: MinuteWindow = field(default_factory=MinuteWindow)
    day: _Budget = field(default_factory=_Budget)
    month: _Budget = field(default_factory=_Budget)
    num_running: int = 0
    """The sequences of running requests."""


@dataclass(slots=True)
class _Held:
    """A reservation, with the bucket and the periods in which its open tokens are counted."""

    account: _Account
    sequences: int
    bucket: int
    periods: Periods
    open: int
    """The tokens that are reserved and not reported as used."""
    used: int = 0
    """The tokens that are reported as used."""


class MemoryStore:
    def __init__(self, now_ms: Callable[[], int] = monotonic_ms, now_unix_s: Callable[[], float] = time.time) -> None:
        self._now_ms = now_ms
        self._calendar = Calendar(now_unix_s)
        self._accounts: dict[str, _Account] = {}
        """All accounts that were seen; their number is limited by that of keys and tenants."""
        self._held: dict[str, _Held] = {}

    @property
    def num_held(self) -> int:
        return len(self._held)

    def holds(self, lease: str) -> bool:
        return lease in self._held

    async def reserve(self, ask: ReservationRequest) -> ReservationAnswer:
        return self.decide(ask)

    def decide(self, ask: ReservationRequest) -> ReservationAnswer:
        account, now_ms, periods = self._enter(ask.account)
        amount = amount_of(ask)
        refused, retry_after_s = _refusal(account, ask, amount, now_ms, periods)
        if refused is None:
            self._take(account, ask, amount, now_ms, periods)
        return _answer(account, ask, amount, now_ms, refused, retry_after_s)

    def record(self, ask: ReservationRequest) -> None:
        """Count a reservation that another store decided, regardless of the limits."""
        account, now_ms, periods = self._enter(ask.account)
        self._take(account, ask, amount_of(ask), now_ms, periods)

    async def extend(self, more: ExtensionRequest) -> int:
        return self.decide_more(more)

    def decide_more(self, more: ExtensionRequest) -> int:
        held = self._held.get(more.lease)
        if held is None:
            return 0
        now_ms = self._rebook(held, more)
        granted = max(0, min(_left(held.account, more)))
        self._add(held, granted, now_ms)
        return granted

    def record_more(self, more: ExtensionRequest) -> None:
        """Count further tokens that another store granted."""
        held = self._held.get(more.lease)
        if held is not None:
            self._add(held, more.tokens, self._rebook(held, more))

    async def use(self, accounts: Sequence[str]) -> UseReport:
        return UseReport([self.use_of(each) for each in accounts])

    def use_of(self, name: str) -> Use:
        """Return what the account has used here; nothing for one that was not seen."""
        if name not in self._accounts:
            return Use()
        account, _, _ = self._enter(name)
        return Use(
            account.requests.used, account.tokens.used, account.num_running, account.day.used, account.month.used
        )

    def adopt(self, ask: ReservationRequest) -> None:
        self.record(ask)

    def settle(self, lease: str, tokens: int) -> None:
        held = self._held.pop(lease, None)
        if held is None:
            return
        account = held.account
        account.num_running -= held.sequences
        difference = max(0, tokens - held.used) - held.open
        account.tokens.correct(held.bucket, difference, self._now_ms())
        account.day.correct(held.periods.day, difference)
        account.month.correct(held.periods.month, difference)

    def undo(self, lease: str) -> None:
        held = self._held.get(lease)
        if held is not None:
            self.settle(lease, 0)
            held.account.requests.correct(held.bucket, -1, self._now_ms())

    async def settled(self) -> None:
        """Do nothing: `settle` counts at once."""

    async def close(self) -> None:
        """Do nothing: there is nothing to publish."""

    def _enter(self, name: str) -> tuple[_Account, int, Periods]:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account()
        now_ms, periods = self._now_ms(), self._calendar.now()
        account.requests.forget_old(now_ms)
        account.tokens.forget_old(now_ms)
        account.day.enter(periods.day)
        account.month.enter(periods.month)
        return account, now_ms, periods

    def _take(self, account: _Account, ask: ReservationRequest, amount: int, now_ms: int, periods: Periods) -> None:
        account.requests.add(1, now_ms)
        bucket = account.tokens.add(amount, now_ms)
        account.day.used += amount
        account.month.used += amount
        account.num_running += ask.sequences
        self._held[ask.lease] = _Held(account, ask.sequences, bucket, periods, amount, ask.used)

    def _rebook(self, held: _Held, more: ExtensionRequest) -> int:
        """Move the open tokens to the current bucket and periods; tokens used since the last report stay."""
        account, now_ms, periods = self._enter(more.account)
        rest = held.open - max(0, more.used - held.used)
        excess, rest = max(0, -rest), max(0, rest)
        account.tokens.correct(held.bucket, -rest, now_ms)
        held.bucket = account.tokens.add(rest + excess, now_ms)
        account.day.used += excess + (rest if held.periods.day != periods.day else 0)
        account.month.used += excess + (rest if held.periods.month != periods.month else 0)
        held.open, held.used, held.periods = rest, max(held.used, more.used), periods
        return now_ms

    def _add(self, held: _Held, amount: int, now_ms: int) -> None:
        held.account.tokens.add(amount, now_ms)
        held.account.day.used += amount
        held.account.month.used += amount
        held.open += amount


def _left(account: _Account, more: ExtensionRequest) -> list[int]:
    """Return the tokens that each limit leaves."""
    limits = more.limits
    used = (
        (limits.tokens_per_minute, account.tokens.used),
        (limits.tokens_per_day, account.day.used),
        (limits.tokens_per_month, account.month.used),
    )
    return [more.tokens, *(limit - amount for limit, amount in used if limit is not None)]


def _refusal(
    account: _Account, ask: ReservationRequest, amount: int, now_ms: int, periods: Periods
) -> tuple[Reason | None, float]:
    """Return the limit that is exceeded and the time to wait; of several, the one with the longest period."""
    limits = ask.limits
    if amount < min(ask.tokens, ask.least):
        return _smallest(limits), BEYOND_SHARE_RETRY_S
    if _overdrawn(account.month, amount, limits.tokens_per_month):
        return "budget_month", periods.month_left_s
    if _overdrawn(account.day, amount, limits.tokens_per_day):
        return "budget_day", periods.day_left_s
    if limits.requests_per_minute is not None:
        wait_ms = account.requests.wait_ms(1, limits.requests_per_minute, now_ms)
        if wait_ms:
            return "requests", wait_ms / 1000
    if limits.tokens_per_minute is not None and amount:
        wait_ms = account.tokens.wait_ms(amount, limits.tokens_per_minute, now_ms)
        if wait_ms:
            return "tokens", wait_ms / 1000
    if limits.concurrency is not None and account.num_running + ask.sequences > limits.concurrency:
        return "concurrency", CONCURRENCY_RETRY_S
    return None, 0.0


def _smallest(limits: Limits) -> Reason:
    """Return the smallest of the token limits."""
    bounds: dict[Reason, int | None] = {
        "tokens": limits.tokens_per_minute,
        "budget_day": limits.tokens_per_day,
        "budget_month": limits.tokens_per_month,
    }
    found = {reason: bound for reason, bound in bounds.items() if bound is not None}
    return min(found, key=found.__getitem__)


def _overdrawn(budget: _Budget, amount: int, limit: int | None) -> bool:
    return limit is not None and amount > 0 and budget.used + amount > limit


def _answer(
    account: _Account, ask: ReservationRequest, amount: int, now_ms: int, refused: Reason | None, retry_after_s: float
) -> ReservationAnswer:
    per_request, per_token = ask.limits.requests_per_minute, ask.limits.tokens_per_minute
    return ReservationAnswer(
        refused,
        retry_after_s,
        None if per_request is None else account.requests.level(per_request, now_ms),
        None if per_token is None else account.tokens.level(per_token, now_ms),
        granted=amount if refused is None else 0,
    )
