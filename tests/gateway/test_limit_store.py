"""The limit store in memory: no minute exceeds a limit, no token is lost, and no state remains."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from limit_histories import limits, sequences_of, step

from examples import num_examples
from pagemill_gateway.limits.memory import MemoryStore
from pagemill_gateway.limits.periods import Calendar
from pagemill_gateway.limits.store import ExtensionRequest, ReservationAnswer, ReservationRequest
from pagemill_servers.keys.caller import Limits

MINUTE_MS = 60_000
LATE_ON_SATURDAY_S = 1_795_391_000.0
"""2026-11-22, some hours before midnight."""

steps = st.lists(step, max_size=60)


@dataclass
class Taken:
    """One granted request in the test's own complete accounts."""

    at_ms: int
    lease: str
    sequences: int
    reserved: int
    open_at_ms: int
    """The time at which the reserved tokens without a report were booked."""
    reported: int = 0
    used: int | None = None
    settled_at_ms: int = 0
    reports: list[tuple[int, int]] = field(default_factory=list)
    """Tokens that were reported as used, and the times at which they had been booked."""

    def charges(self) -> list[tuple[int, int]]:
        """Return charges with their times: used tokens count when they were booked, an excess when it was reported."""
        opened = self.reserved - self.reported
        if self.used is None:
            return [*self.reports, (self.open_at_ms, opened)]
        used = max(0, self.used - self.reported)
        excess = max(0, used - opened)
        return [*self.reports, (self.open_at_ms, min(used, opened)), (self.settled_at_ms, excess)]

    def extended(self, used: int, granted: int, now_ms: int) -> None:
        self.reports.append((self.open_at_ms, used - self.reported))
        self.reported, self.open_at_ms = used, now_ms
        self.reserved += granted


@dataclass
class Bookkeeper:
    taken: list[Taken] = field(default_factory=list)

    def in_minute_before(self, now_ms: int) -> tuple[int, int]:
        """Return the requests and tokens of the last 60 seconds."""
        requests = sum(now_ms - MINUTE_MS < each.at_ms for each in self.taken)
        charges = [charge for each in self.taken for charge in each.charges()]
        return requests, sum(tokens for at_ms, tokens in charges if now_ms - MINUTE_MS < at_ms)

    @property
    def open(self) -> list[Taken]:
        return [each for each in self.taken if each.used is None]

    @property
    def total(self) -> int:
        return sum(tokens for each in self.taken for _, tokens in each.charges())


class World:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.now_ms = 5_000_000
        self.store = MemoryStore(lambda: self.now_ms, lambda: LATE_ON_SATURDAY_S)
        self.book = Bookkeeper()
        self._numbers = itertools.count()

    def reserve(self, tokens: int, sequences: int = 1) -> ReservationAnswer:
        lease = str(next(self._numbers))
        answer = self.store.decide(ReservationRequest("a", lease, tokens, self.limits, sequences))
        if answer.refused is None:
            self.book.taken.append(Taken(self.now_ms, lease, sequences, answer.granted, self.now_ms))
        return answer

    def extend(self, taken: Taken, tokens: int) -> int:
        """Extend the reservation after half of it was used; return the number of granted tokens."""
        used = max(taken.reported, taken.reserved // 2)
        granted = self.store.decide_more(ExtensionRequest("a", taken.lease, used, tokens, self.limits))
        taken.extended(used, granted, self.now_ms)
        return granted

    def settle(self, taken: Taken, tokens: int) -> None:
        taken.used, taken.settled_at_ms = tokens, self.now_ms
        self.store.settle(taken.lease, tokens)


@settings(max_examples=num_examples(300), deadline=None)
@given(limits=limits, steps=steps)
def test_no_minute_exceeds_its_limits(limits: Limits, steps: list[tuple[str, int]]) -> None:
    world = World(limits)
    for kind, amount in steps:
        if kind == "wait":
            world.now_ms += amount
        elif kind == "reserve":
            granted = world.reserve(amount, sequences_of(amount)).refused is None
            requests, tokens = world.book.in_minute_before(world.now_ms)
            if granted and limits.requests_per_minute is not None:
                assert requests <= limits.requests_per_minute
            if granted and amount and limits.tokens_per_minute is not None:
                assert tokens <= limits.tokens_per_minute
            if granted and limits.concurrency is not None:
                assert sum(each.sequences for each in world.book.open) <= limits.concurrency
        elif kind == "extend" and world.book.open:
            granted = world.extend(world.book.open[-1], amount) > 0
            if granted and limits.tokens_per_minute is not None:
                assert world.book.in_minute_before(world.now_ms)[1] <= limits.tokens_per_minute
        elif world.book.open:
            world.settle(world.book.open[0], amount)


@settings(max_examples=num_examples(200), deadline=None)
@given(limits=limits, steps=steps)
def test_retry_after_is_neither_too_early_nor_too_late(limits: Limits, steps: list[tuple[str, int]]) -> None:
    world = World(limits._replace(concurrency=None, tokens_per_day=None, tokens_per_month=None))
    for kind, amount in steps:
        if kind == "wait":
            world.now_ms += amount
        elif kind == "settle" and world.book.open:
            world.settle(world.book.open[0], amount)
        elif kind == "extend" and world.book.open:
            world.extend(world.book.open[0], amount)
        elif kind == "reserve" and (answer := world.reserve(amount)).refused is not None:
            retry_ms = round(answer.retry_after_s * 1000)
            assert 0 < retry_ms <= MINUTE_MS + 1000
            world.now_ms += retry_ms - 1
            assert world.reserve(amount).refused is not None, "the request would have been granted earlier"
            world.now_ms += 1
            again = world.reserve(amount)
            assert again.refused != answer.refused, "the named limit must have capacity now"


@settings(max_examples=num_examples(200), deadline=None)
@given(limits=limits, steps=steps)
def test_settled_tokens_are_conserved_and_no_state_remains(limits: Limits, steps: list[tuple[str, int]]) -> None:
    """Budgets contain exactly the used tokens, all slots are free again, and the minute is empty."""
    world = World(limits._replace(tokens_per_day=10**9, tokens_per_month=10**9))
    for kind, amount in steps:
        if kind == "wait":
            world.now_ms += amount
        elif kind == "reserve":
            world.reserve(amount, sequences_of(amount))
        elif kind == "extend" and world.book.open:
            world.extend(world.book.open[-1], amount)
        elif world.book.open:
            world.settle(world.book.open[0], max(amount, world.book.open[0].reported))
    for taken in world.book.open:
        world.settle(taken, taken.reported + 3)
    assert world.store.num_held == 0
    used = sum(taken.used or 0 for taken in world.book.taken)
    # Exactly this number of tokens is left of the day.
    probe = Limits(tokens_per_day=used + 10)
    assert world.store.decide(
        ReservationRequest("a", "over", 11, probe._replace(tokens_per_day=used + 10))
    ).refused == ("budget_day" if used else None)
    if used:
        assert world.store.decide(ReservationRequest("a", "fits", 10, probe)).refused is None


def test_the_whole_limit_is_available_after_its_reset() -> None:
    world = World(Limits(requests_per_minute=2, tokens_per_minute=100))
    world.reserve(40)
    answer = world.reserve(60)
    assert answer.requests is not None
    assert answer.tokens is not None
    assert (answer.requests.remaining, answer.tokens.remaining) == (0, 0)
    assert world.reserve(1).refused == "requests"
    world.now_ms += round(answer.tokens.reset_s * 1000)
    fresh = world.reserve(100)
    assert fresh.refused is None


def test_unused_tokens_are_returned_at_once() -> None:
    world = World(Limits(tokens_per_minute=100))
    world.reserve(100)
    assert world.reserve(10).refused == "tokens"
    world.settle(world.book.taken[0], 20)
    assert world.reserve(80).refused is None


def test_an_answer_longer_than_reserved_is_charged_from_its_end_on() -> None:
    world = World(Limits(tokens_per_minute=100))
    world.reserve(10)
    world.now_ms += 50_000
    world.settle(world.book.taken[0], 100)
    world.now_ms += 30_000
    assert world.reserve(20).refused == "tokens"
    world.now_ms += 31_000
    assert world.reserve(20).refused is None


def test_a_request_without_tokens_is_checked_against_the_other_limits_only() -> None:
    world = World(Limits(3, 100, concurrency=2, tokens_per_day=100, tokens_per_month=100))
    world.reserve(10)
    world.settle(world.book.taken[0], 500)
    assert world.reserve(1).refused == "budget_month"
    answer = world.reserve(0)
    assert (answer.refused, answer.tokens and answer.tokens.remaining) == (None, 0)
    assert world.reserve(0).refused is None
    assert world.reserve(0).refused == "requests"
    world.now_ms += MINUTE_MS + 1000
    assert world.reserve(0).refused == "concurrency"
    world.settle(world.book.taken[1], 0)
    assert world.reserve(0).refused is None


def test_a_lease_is_settled_once_and_unknown_leases_change_nothing() -> None:
    world = World(Limits(concurrency=1))
    world.reserve(5)
    world.store.settle("unknown", 1000)
    world.settle(world.book.taken[0], 5)
    world.settle(world.book.taken[0], 5)
    assert world.reserve(5).refused is None
    assert world.reserve(5).refused == "concurrency", "settling twice must free one slot"


def test_budgets_restart_with_the_day_and_the_month() -> None:
    now_s = 1_796_083_200.0 - 10  # ten seconds before December 2026
    store = MemoryStore(lambda: 0, lambda: now_s)
    daily, monthly = Limits(tokens_per_day=100), Limits(tokens_per_month=100)
    assert store.decide(ReservationRequest("d", "1", 100, daily)).refused is None
    refused = store.decide(ReservationRequest("d", "2", 1, daily))
    assert (refused.refused, refused.retry_after_s) == ("budget_day", 10)
    assert store.decide(ReservationRequest("m", "3", 100, monthly)).refused is None
    assert store.decide(ReservationRequest("m", "4", 1, monthly)).refused == "budget_month"
    now_s += 11
    assert store.decide(ReservationRequest("d", "5", 100, daily)).refused is None
    assert store.decide(ReservationRequest("m", "6", 60, monthly)).refused is None
    store.settle("3", 5)
    assert store.decide(ReservationRequest("m", "7", 40, monthly)).refused is None, (
        "an answer of last month is no refund of this month"
    )


def test_the_calendar_is_utc_and_handles_the_end_of_the_year() -> None:
    now_s = 1_798_761_599.5  # half a second before 2027
    calendar = Calendar(lambda: now_s)
    assert calendar.now() == ("20261231", "202612", 0.5, 0.5)
    now_s += 0.5
    assert calendar.now() == ("20270101", "202701", 86_400.0, 31 * 86_400.0)
    now_s -= 1.0  # the clock was set back
    assert calendar.now() == ("20261231", "202612", 1.0, 1.0)


def test_accounts_are_independent() -> None:
    store = MemoryStore()
    limits = Limits(requests_per_minute=1)
    assert store.decide(ReservationRequest("a", "1", 1, limits)).refused is None
    assert store.decide(ReservationRequest("b", "2", 1, limits)).refused is None
    assert store.decide(ReservationRequest("a", "3", 1, limits)).refused == "requests"


# -- growing reservations ---------------------------------------------------------------------------------------------


def test_a_reservation_grows_by_what_every_limit_allows() -> None:
    world = World(Limits(tokens_per_minute=100, tokens_per_day=90, tokens_per_month=95))
    world.reserve(40)
    (taken,) = world.book.taken
    assert world.extend(taken, 30) == 30
    assert world.extend(taken, 30) == 20, "70 of the day's 90 are reserved"
    assert world.extend(taken, 30) == 0
    assert world.reserve(1).refused == "budget_day"


def test_unreported_tokens_count_from_the_last_growth_and_used_ones_from_before() -> None:
    world = World(Limits(tokens_per_minute=100))
    world.reserve(60)
    (taken,) = world.book.taken
    world.now_ms += 40_000
    world.extend(taken, 10)  # 30 are used, 40 are unreported
    world.now_ms += 21_000
    assert world.reserve(61).refused == "tokens"
    assert world.reserve(60).refused is None, "the first 30 are older than a minute"


def test_an_unknown_or_settled_reservation_does_not_grow() -> None:
    world = World(Limits(tokens_per_minute=100))
    assert world.store.decide_more(ExtensionRequest("a", "unknown", 0, 10, world.limits)) == 0
    world.reserve(10)
    (taken,) = world.book.taken
    world.settle(taken, 5)
    assert world.extend(taken, 10) == 0
    assert world.reserve(95).refused is None


def test_tokens_unreported_at_midnight_count_for_the_next_day_after_growth() -> None:
    now_s = 1_796_083_200.0 - 10  # ten seconds before December 2026
    store = MemoryStore(lambda: 0, lambda: now_s)
    limits = Limits(tokens_per_day=100, tokens_per_month=100)
    assert store.decide(ReservationRequest("a", "1", 80, limits)).refused is None
    now_s += 20
    assert store.decide_more(ExtensionRequest("a", "1", 30, 40, limits)) == 40
    assert store.decide(ReservationRequest("a", "2", 11, limits)).refused == "budget_month", (
        "50 unreported tokens of before, and 40 more"
    )
    store.settle("1", 100)
    assert store.decide(ReservationRequest("a", "3", 31, limits)).refused == "budget_month"
    assert store.decide(ReservationRequest("a", "4", 30, limits)).refused is None, "70 were used after the report"


def test_use_beyond_the_reservation_is_charged_with_the_report() -> None:
    world = World(Limits(tokens_per_minute=100))
    world.reserve(10)
    (taken,) = world.book.taken
    assert world.store.decide_more(ExtensionRequest("a", taken.lease, 40, 100, world.limits)) == 60
    world.store.settle(taken.lease, 45)
    assert world.reserve(56).refused == "tokens"
    assert world.reserve(55).refused is None


def test_a_request_gets_at_most_the_limit_and_nothing_below_its_minimum() -> None:
    store = MemoryStore()
    limits = Limits(tokens_per_minute=100, tokens_per_day=60)
    assert store.decide(ReservationRequest("a", "1", 500, limits, least=61)).refused == "budget_day"
    answer = store.decide(ReservationRequest("a", "2", 500, limits, least=60))
    assert (answer.refused, answer.granted) == (None, 60)


def test_an_adopted_reservation_continues_with_its_state() -> None:
    store = MemoryStore()
    limits = Limits(tokens_per_minute=100, concurrency=4)
    store.adopt(ReservationRequest("a", "1", 40, limits, sequences=3, used=500))
    assert store.decide(ReservationRequest("a", "2", 1, limits, sequences=2)).refused == "concurrency"
    assert store.decide(ReservationRequest("a", "3", 61, limits)).refused == "tokens"
    store.settle("1", 510)
    assert store.decide(ReservationRequest("a", "4", 90, limits)).refused is None
