"""The store of one gateway: counts in memory, exact, forgotten with the process.

All gateways together are `redis`'s, which falls back to this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pagemill_gateway.limits.periods import Periods, periods_at
from pagemill_gateway.limits.store import Answer, Ask, Reason
from pagemill_gateway.limits.window import Window

CONCURRENCY_RETRY_S = 1.0
"""When a place gets free is not known; requests take seconds."""


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Amounts(NamedTuple):
    """What one reservation counts for, by counter."""

    window: int
    day: int
    month: int


def amounts_of(ask: Ask) -> Amounts:
    """A request larger than a limit takes all of it, or it could never be served."""
    limits = ask.limits
    return Amounts(*(ask.tokens if each is None else min(ask.tokens, each) for each in (
        limits.tokens_per_minute, limits.tokens_per_day, limits.tokens_per_month,
    )))  # fmt: skip


@dataclass(slots=True)
class _Budget:
    """Tokens used in the current day or month."""

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
    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    day: _Budget = field(default_factory=_Budget)
    month: _Budget = field(default_factory=_Budget)
    num_running: int = 0


class _Held(NamedTuple):
    account: _Account
    bucket: int
    amounts: Amounts
    periods: Periods


class MemoryStore:
    def __init__(self, now_ms: Callable[[], int] = monotonic_ms, now_unix_s: Callable[[], float] = time.time) -> None:
        self._now_ms = now_ms
        self._now_unix_s = now_unix_s
        self._accounts: dict[str, _Account] = {}
        """As many as keys and tenants were seen: people make those, not requests."""
        self._held: dict[str, _Held] = {}

    @property
    def num_held(self) -> int:
        return len(self._held)

    def holds(self, lease: str) -> bool:
        return lease in self._held

    async def reserve(self, ask: Ask) -> Answer:
        return self.decide(ask)

    def decide(self, ask: Ask) -> Answer:
        account, now_ms, periods = self._enter(ask.account)
        refused, retry_after_s = _refusal(account, ask, now_ms, periods)
        if refused is None:
            self._take(account, ask, now_ms, periods)
        return _answer(account, ask, now_ms, refused, retry_after_s)

    def record(self, ask: Ask) -> None:
        """Somebody else decided; count it here as well, whatever the limits."""
        account, now_ms, periods = self._enter(ask.account)
        self._take(account, ask, now_ms, periods)

    def adopt(self, ask: Ask) -> None:
        self.record(ask)

    def settle(self, lease: str, tokens: int) -> None:
        held = self._held.pop(lease, None)
        if held is None:
            return
        account = held.account
        account.num_running -= 1
        account.tokens.correct(held.bucket, tokens - held.amounts.window, self._now_ms())
        account.day.correct(held.periods.day, tokens - held.amounts.day)
        account.month.correct(held.periods.month, tokens - held.amounts.month)

    async def close(self) -> None:
        """Nothing is left to be told."""

    def _enter(self, name: str) -> tuple[_Account, int, Periods]:
        account = self._accounts.setdefault(name, _Account())
        now_ms, periods = self._now_ms(), periods_at(self._now_unix_s())
        account.requests.forget_old(now_ms)
        account.tokens.forget_old(now_ms)
        account.day.enter(periods.day)
        account.month.enter(periods.month)
        return account, now_ms, periods

    def _take(self, account: _Account, ask: Ask, now_ms: int, periods: Periods) -> None:
        amounts = amounts_of(ask)
        account.requests.add(1, now_ms)
        bucket = account.tokens.add(amounts.window, now_ms)
        account.day.used += amounts.day
        account.month.used += amounts.month
        account.num_running += 1
        self._held[ask.lease] = _Held(account, bucket, amounts, periods)


def _refusal(account: _Account, ask: Ask, now_ms: int, periods: Periods) -> tuple[Reason | None, float]:
    """The first limit without room, the one that takes longest to come back first."""
    limits, amounts = ask.limits, amounts_of(ask)
    if _overdrawn(account.month, amounts.month, limits.tokens_per_month):
        return "budget_month", periods.month_left_s
    if _overdrawn(account.day, amounts.day, limits.tokens_per_day):
        return "budget_day", periods.day_left_s
    if limits.requests_per_minute is not None:
        wait_ms = account.requests.wait_ms(1, limits.requests_per_minute, now_ms)
        if wait_ms:
            return "requests", wait_ms / 1000
    if limits.tokens_per_minute is not None and amounts.window:
        wait_ms = account.tokens.wait_ms(amounts.window, limits.tokens_per_minute, now_ms)
        if wait_ms:
            return "tokens", wait_ms / 1000
    if limits.concurrency is not None and account.num_running >= limits.concurrency:
        return "concurrency", CONCURRENCY_RETRY_S
    return None, 0.0


def _overdrawn(budget: _Budget, amount: int, limit: int | None) -> bool:
    return limit is not None and amount > 0 and budget.used + amount > limit


def _answer(account: _Account, ask: Ask, now_ms: int, refused: Reason | None, retry_after_s: float) -> Answer:
    per_request, per_token = ask.limits.requests_per_minute, ask.limits.tokens_per_minute
    return Answer(
        refused,
        retry_after_s,
        None if per_request is None else account.requests.level(per_request, now_ms),
        None if per_token is None else account.tokens.level(per_token, now_ms),
    )
