"""The store of several gateways: Redis decides atomically; while it is unavailable, each gateway applies its share.

Every reservation is also recorded in a memory store, so that a gateway without Redis knows its own use. Settlements
that Redis missed are published later. The leases of a gateway that died expire. Requests that began without Redis are
charged to budgets when it is back; if the reply to that is lost, they may be charged twice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from pagemill_gateway.limits.memory import MemoryStore, monotonic_ms
from pagemill_gateway.limits.periods import Calendar, Periods
from pagemill_gateway.limits.redis.link import RedisLink, RedisUnavailable, Script
from pagemill_gateway.limits.store import (
    ExtensionRequest,
    Level,
    ReservationAnswer,
    ReservationRequest,
    Use,
    UseReport,
    amount_of,
)
from pagemill_servers.keys.caller import Limits

logger = logging.getLogger("pagemill.gateway.limits")

LEASE_S = 30
RENEW_S = 10.0
BEAT_S = 2.0
ALIVE_S = 15
"""A gateway without a heartbeat for this long gets no share."""
PROBE_S = 0.25
"""Interval of probes while Redis is unavailable."""
MAX_BATCH = 128
BUDGET_EXPIRE_S = 32 * 24 * 3600
CLOSE_TIMEOUT_S = 1.0

RESERVE, EXTEND, SETTLE, USE = (Script("window", name) for name in ("reserve", "extend", "settle", "use"))
RENEW, BEAT = Script("renew"), Script("beat")


class _Open(NamedTuple):
    account: str
    running: str
    """The reservation's member in the account's sorted set of running leases."""
    periods: Periods
    """The periods in which its open tokens are counted."""
    known: bool
    """Whether Redis has the reservation or, if `in_doubt`, may have it."""
    in_doubt: bool = False


class _Ended(NamedTuple):
    lease: str
    tokens: int
    reservation: _Open
    is_undone: bool = False
    """Whether its request does not count either."""


class RedisStore:
    """The store. Create it inside a running event loop, and call `start` before use."""

    def __init__(
        self,
        link: RedisLink,
        *,
        num_gateways: int = 1,
        on_fallback: Callable[[], None] = lambda: None,
        now_ms: Callable[[], int] | None = None,  # None outside tests: the server's clock
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        """`num_gateways` applies until Redis reports the number of gateways."""
        self._link = link
        self._name = secrets.token_hex(8)
        """The random name of this gateway process."""
        self._on_fallback = on_fallback
        self._now_ms = now_ms
        self._calendar = Calendar(now_unix_s)
        self.num_gateways = max(1, num_gateways)
        self.local = MemoryStore(now_ms or monotonic_ms, now_unix_s)
        self._open: dict[str, _Open] = {}
        self._ended: deque[_Ended] = deque()
        self._flushing = asyncio.Lock()
        self._queued_usage: defaultdict[str, int] = defaultdict(int)
        """The tokens of requests unknown to Redis, by budget counter."""
        self._num_publishing = 0
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def up(self) -> bool:
        return self._link.breaker.closed

    @property
    def num_openings(self) -> int:
        """How often the breaker has opened."""
        return self._link.breaker.num_openings

    @property
    def num_unpublished(self) -> int:
        """The number of settlements and charges that Redis does not know yet."""
        return self._num_publishing + len(self._ended) + len(self._queued_usage)

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(each) for each in (self._heartbeat_for_ever(), self._renew_for_ever(), self._publish())
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.flush()
                await self._link.remove(self._key("gateways"), [self._name])
        except (RedisUnavailable, TimeoutError):
            logger.warning("the gateway stops, and Redis does not know that %d requests have ended", len(self._ended))
        await self._link.close()

    # -- methods of `Store` --------------------------------------------------------------------------------------------

    async def reserve(self, ask: ReservationRequest) -> ReservationAnswer:
        reservation = self._opened(ask)
        try:
            raw = await self._link.run(RESERVE, self._keys(reservation), self._reserve_arguments(ask, reservation))
        except RedisUnavailable as away:
            return self._reserve_here(ask, reservation._replace(known=away.in_doubt, in_doubt=away.in_doubt))
        except asyncio.CancelledError:
            self._end(_Ended(ask.lease, 0, reservation._replace(in_doubt=True)))
            raise
        answer = _answer(ask, raw)
        if answer.refused is None:
            self._open[ask.lease] = reservation
            self.local.record(ask)
        return answer

    async def extend(self, more: ExtensionRequest) -> int:
        reservation = self._open.get(more.lease)
        if reservation is None:
            return 0
        periods = self._calendar.now()
        if reservation.known:
            now = reservation._replace(periods=periods)
            _, tokens, _, held, *booked = self._keys(reservation)
            keys = [tokens, held, *booked, *self._keys(now)[4:]]
            with suppress(RedisUnavailable):
                granted = int(await self._link.run(EXTEND, keys, self._extend_arguments(more, periods)))
                if granted >= 0:
                    return self._extended(more._replace(tokens=granted), now)
        self._on_fallback()
        return self.local.decide_more(more._replace(limits=share_of(more.limits, self.num_gateways)))

    def _extended(self, more: ExtensionRequest, reservation: _Open) -> int:
        if more.lease in self._open:
            self._open[more.lease] = reservation
            self.local.record_more(more)
        return more.tokens

    def _opened(self, ask: ReservationRequest) -> _Open:
        return _Open(ask.account, f"{ask.lease}|{ask.sequences}", self._calendar.now(), known=True)

    def adopt(self, ask: ReservationRequest) -> None:
        self._open[ask.lease] = self._opened(ask)
        self.local.record(ask)

    async def use(self, accounts: Sequence[str]) -> UseReport:
        periods, found = self._calendar.now(), list[Use]()
        try:
            for start in range(0, len(accounts), MAX_BATCH):
                calls = [(self._use_keys(each, periods), [self._now()]) for each in accounts[start : start + MAX_BATCH]]
                found += [Use(*map(int, each)) for each in await self._link.run_all(USE, calls) if each is not None]
        except RedisUnavailable:
            found = []
        if len(found) < len(accounts):
            return (await self.local.use(accounts))._replace(is_shared=False)
        return UseReport(found)

    def _use_keys(self, account: str, periods: Periods) -> list[str]:
        names = ("requests", "tokens", "running", f"day:{periods.day}", f"month:{periods.month}")
        return [self._account_key(account, name) for name in names]

    def settle(self, lease: str, tokens: int) -> None:
        self.local.settle(lease, tokens)
        self._close(lease, tokens)

    def undo(self, lease: str) -> None:
        self.local.undo(lease)
        self._close(lease, 0, is_undone=True)

    def _close(self, lease: str, tokens: int, *, is_undone: bool = False) -> None:
        reservation = self._open.pop(lease, None)
        if reservation is None:
            return
        if reservation.known:
            self._end(_Ended(lease, tokens, reservation, is_undone))
        else:
            self._queue_usage(reservation, tokens)

    async def settled(self) -> None:
        with suppress(RedisUnavailable):
            await self.flush()

    # -- without Redis ------------------------------------------------------------------------------------------------

    def _reserve_here(self, ask: ReservationRequest, reservation: _Open) -> ReservationAnswer:
        self._on_fallback()
        share = share_of(ask.limits, self.num_gateways)
        answer = with_whole_limits(self.local.decide(ask._replace(limits=share)), ask.limits)
        if answer.refused is None:
            self._open[ask.lease] = reservation
        elif reservation.in_doubt:
            self._end(_Ended(ask.lease, 0, reservation))
        return answer

    def _queue_usage(self, reservation: _Open, tokens: int) -> None:
        if tokens:
            for key in self._keys(reservation)[4:]:
                self._queued_usage[key] += tokens
            self._wake.set()

    # -- publication to Redis ----------------------------------------------------------------------------------------

    def _end(self, ended: _Ended) -> None:
        self._ended.append(ended)
        self._wake.set()

    async def _publish(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self.flush()
            except RedisUnavailable:
                continue  # the next successful heartbeat wakes this task

    async def flush(self) -> None:
        """Publish all settlements and charges. Raises `RedisUnavailable`; unpublished ones are kept."""
        async with self._flushing:
            while self._ended or self._queued_usage:
                batch = [self._ended.popleft() for _ in range(min(MAX_BATCH, len(self._ended)))]
                owed, self._queued_usage = self._queued_usage, defaultdict(int)
                self._num_publishing += len(batch) + len(owed)
                try:
                    await self._publish_usage(batch, owed)
                finally:
                    self._num_publishing -= len(batch) + len(owed)

    async def _publish_usage(self, batch: list[_Ended], owed: dict[str, int]) -> None:
        """Publish a batch, and put back what could not be published."""
        try:
            settled = await self._link.run_all(SETTLE, [self._settlement(each) for each in batch]) if batch else []
            batch, published = [], batch
            for each, was_open in zip(published, settled, strict=True):
                if each.reservation.in_doubt and not was_open:
                    self._queue_usage(each.reservation, each.tokens)
            if owed:
                await self._link.add(owed, BUDGET_EXPIRE_S)
        except BaseException:
            self._ended.extendleft(reversed(batch))
            for key, tokens in owed.items():
                self._queued_usage[key] += tokens
            raise

    def _settlement(self, ended: _Ended) -> tuple[list[str], list[str | int]]:
        reservation = ended.reservation
        requests, *others = self._keys(reservation)
        flags = int(reservation.in_doubt), int(ended.is_undone)
        return [*others, requests], [ended.lease, reservation.running, ended.tokens, self._now(), *flags]

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._renew()
            except RedisUnavailable:
                continue

    async def _renew(self) -> None:
        """Renew all leases, including those unknown to Redis, whose requests count for the concurrency too."""
        by_account: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for lease, reservation in self._open.items():
            by_account[reservation.account][lease] = reservation.running
        for account, running in by_account.items():
            keys = [self._account_key(account, name) for name in ("running", "open")]
            await self._link.run(RENEW, keys, [LEASE_S * 1000, *running.values()])
            gone = [name for lease, name in running.items() if lease not in self._open]
            if gone:  # they ended during the call, which may have added them again
                await self._link.remove(keys[0], gone)

    async def _heartbeat_for_ever(self) -> None:
        while True:
            await self._heartbeat()
            await asyncio.sleep(BEAT_S if self.up else PROBE_S)

    async def _heartbeat(self) -> None:
        try:
            alive = await self._link.probe(BEAT, [self._key("gateways")], [self._name, ALIVE_S * 1000])
        except RedisUnavailable:
            return
        self.num_gateways = max(1, int(alive))
        self._link.breaker.probed()
        self._wake.set()

    # -- names --------------------------------------------------------------------------------------------------------

    def _keys(self, reservation: _Open) -> list[str]:
        """Return the keys of a reservation. The tag in braces puts an account in one slot of a Redis cluster."""
        periods = reservation.periods
        names = ("requests", "tokens", "running", "open", f"day:{periods.day}", f"month:{periods.month}")
        return [self._account_key(reservation.account, name) for name in names]

    def _account_key(self, account: str, name: str) -> str:
        return f"{self._link.prefix}:{{{account}}}:{name}"

    def _now(self) -> str:
        return "" if self._now_ms is None else str(self._now_ms())

    def _key(self, name: str) -> str:
        return f"{self._link.prefix}:{name}"

    def _reserve_arguments(self, ask: ReservationRequest, reservation: _Open) -> list[str | int]:
        limits, periods = ask.limits, reservation.periods
        bounds = (
            limits.requests_per_minute,
            limits.tokens_per_minute,
            limits.concurrency,
            limits.tokens_per_day,
            limits.tokens_per_month,
        )
        lefts = _milliseconds_left(periods)
        return [ask.lease, amount_of(ask), ask.sequences, *_numbers(bounds), LEASE_S * 1000, *lefts, self._now()]

    def _extend_arguments(self, more: ExtensionRequest, periods: Periods) -> list[str | int]:
        limits = more.limits
        bounds = _numbers((limits.tokens_per_minute, limits.tokens_per_day, limits.tokens_per_month))
        return [more.lease, more.used, more.tokens, *bounds, *_milliseconds_left(periods), self._now()]


def _numbers(bounds: tuple[int | None, ...]) -> list[str | int]:
    return ["" if each is None else each for each in bounds]


def _milliseconds_left(periods: Periods) -> tuple[int, int]:
    return int(periods.day_left_s * 1000), int(periods.month_left_s * 1000)


def _answer(ask: ReservationRequest, raw: list[bytes | int]) -> ReservationAnswer:
    refused, retry_ms, requests, requests_reset_ms, tokens, tokens_reset_ms = raw
    return ReservationAnswer(
        refused.decode() or None,  # type: ignore[union-attr, arg-type]  # the script's first value, a Reason or empty
        int(retry_ms) / 1000,
        _level(ask.limits.requests_per_minute, int(requests), int(requests_reset_ms)),
        _level(ask.limits.tokens_per_minute, int(tokens), int(tokens_reset_ms)),
        granted=0 if refused else amount_of(ask),
    )


def _level(limit: int | None, used: int, reset_ms: int) -> Level | None:
    return None if limit is None else Level(limit, max(0, limit - used), reset_ms / 1000)


def share_of(limits: Limits, num_gateways: int) -> Limits:
    """Return the limits divided by the number of gateways, rounded up, so that each is at least 1."""
    return Limits(*(None if each is None else -(-each // num_gateways) for each in limits))


def with_whole_limits(answer: ReservationAnswer, limits: Limits) -> ReservationAnswer:
    """Return the answer with the whole limits for clients; the remaining amounts stay those of this gateway."""
    return answer._replace(
        requests=_whole(answer.requests, limits.requests_per_minute),
        tokens=_whole(answer.tokens, limits.tokens_per_minute),
    )


def _whole(level: Level | None, limit: int | None) -> Level | None:
    return level if level is None or limit is None else level._replace(limit=limit)
