"""The fair queue: turns by priority, then by tokens between keys; limits; and which requests an overload removes."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_routing.admission.fair_queue import MAX_KEPT, MAX_START_TAGS, FairQueue, Waiter


def waiter(key: str = "", at: float = 0.0, *, priority: int = 0, cost: int = 10, size: int = 1, **fields) -> Waiter:
    known = {"expires_at": 1e9, "group": ""} | fields
    return Waiter(key=key, priority=priority, cost_tokens=cost, num_bytes=size, arrived_at=at, **known)


def queue_of(*waiters: Waiter, max_requests: int = 1000, max_bytes: int = 10**9) -> FairQueue[Waiter]:
    queue: FairQueue[Waiter] = FairQueue(max_requests, max_bytes)
    for each in waiters:
        assert queue.add(each) == []
    return queue


def order(queue: FairQueue[Waiter]) -> list[Waiter]:
    taken = []
    while (first := queue.first()) is not None:
        queue.take(first)
        taken.append(first)
    return taken


def jain(shares: list[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def test_requests_of_one_key_are_served_in_order_of_arrival_also_after_a_retry() -> None:
    waiters = [waiter(at=at) for at in (1.0, 2.0, 3.0)]
    queue = queue_of(waiters[0], waiters[2], waiters[1])
    assert order(queue) == waiters


def test_the_lowest_priority_number_is_served_first() -> None:
    late, urgent, usual = waiter(at=0, priority=5), waiter(at=9, priority=-1), waiter(at=1)
    assert order(queue_of(late, urgent, usual)) == [urgent, usual, late]


def test_keys_take_turns_by_tokens_not_by_requests() -> None:
    long = [waiter("long", at, cost=100) for at in range(4)]
    short = [waiter("short", at, cost=10) for at in range(30)]
    served = order(queue_of(*long, *short))
    before_second_long = served[: served.index(long[1])]
    assert 9 <= len([each for each in before_second_long if each.key == "short"]) <= 11


def test_a_request_that_has_paid_before_costs_nothing() -> None:
    again = [waiter("a", at, cost=0) for at in range(3)]
    queue = queue_of(*again, waiter("b", 5), waiter("b", 6))
    assert [each.key for each in order(queue)][:3] == ["a"] * 3


def test_a_key_that_stopped_waiting_gets_no_advantage_over_waiting_keys() -> None:
    queue = queue_of(waiter("quick", 0), *[waiter("steady", at) for at in range(8)])
    turns = []
    for at in range(6):
        first = queue.first()
        assert first is not None
        queue.take(first)
        turns.append(first.key)
        if first.key == "quick":
            queue.add(waiter("quick", 100 + at))
    assert Counter(turns) == {"quick": 3, "steady": 3}


def test_a_turn_that_cost_more_than_expected_is_charged_afterwards() -> None:
    queue = queue_of(*[waiter(key, at) for at in range(20) for key in ("frugal", "wordy")])
    turns: Counter[str] = Counter()
    for _ in range(20):
        first = queue.first()
        assert first is not None
        queue.take(first)
        turns[first.key] += 1
        if first.key == "wordy":
            queue.settle("wordy", 0, 30)
    assert 3 <= turns["wordy"] <= 5


def test_while_the_first_of_a_group_finds_no_capacity_other_groups_are_served() -> None:
    old, new = waiter("a", 0, group="old"), waiter("b", 1, group="new")
    queue = queue_of(old, new)
    assert queue.first() is old
    assert queue.first(blocked={"old"}) is new
    assert queue.first(blocked={"old", "new"}) is None


def test_overload_removes_the_newest_request_of_the_lowest_priority() -> None:
    waiters = [waiter(at=0, priority=1), waiter(at=1, priority=1), waiter(at=2, priority=0)]
    queue = queue_of(*waiters, max_requests=3)
    assert queue.add(waiter(at=3, priority=0)) == [waiters[1]]
    assert queue.add(waiter(at=4, priority=0)) == [waiters[0]]
    newest = waiter(at=5, priority=0)
    assert queue.add(newest) == [newest]
    comes_back = waiter(at=0.5, priority=0)
    (gone,) = queue.add(comes_back)
    assert gone.arrived_at == 4


def test_a_key_that_fills_the_queue_cannot_keep_others_out() -> None:
    queue = queue_of(*[waiter("noisy", at) for at in range(10)], max_requests=10)
    assert [each.arrived_at for each in queue.add(waiter("quiet", 50))] == [9]
    assert [each.arrived_at for each in queue.add(waiter("quiet", 51))] == [8]
    refused = waiter("noisy", 52)
    assert queue.add(refused) == [refused]


def test_overload_removes_no_request_that_an_engine_has_computed_for() -> None:
    lost = [waiter("a", 0.1 * at, priority=1, kept=True) for at in range(3)]
    queue = queue_of(*lost, waiter("a", 5), waiter("b", 6), max_requests=5)
    urgent = waiter("b", 7, priority=-1)
    assert [each.arrived_at for each in queue.add(urgent)] == [6], (
        "the newest of the lowest priority that may be removed"
    )
    one_more = waiter("a", 8, priority=1, kept=True)
    assert [each.arrived_at for each in queue.add(one_more)] == [5]
    late = waiter("c", 9)
    assert queue.add(late) == [late]
    assert set(queue) == {*lost, one_more, urgent}
    no_queue: FairQueue[Waiter] = FairQueue(0, 0)
    assert no_queue.add(waiter(kept=True)) == []
    assert len(no_queue) == 1
    assert queue.find_inconsistencies() == no_queue.find_inconsistencies() == []


@pytest.mark.parametrize("max_requests", [0, 1])
def test_the_number_of_requests_that_overload_spares_is_bounded(max_requests: int) -> None:
    queue: FairQueue[Waiter] = FairQueue(max_requests, 10**9)
    lost = [waiter("a", at, kept=True) for at in range(MAX_KEPT)]
    assert [gone for each in lost for gone in queue.add(each)] == []
    one_more = waiter("b", 0, priority=-1, kept=True)
    assert queue.add(one_more) == [one_more]
    queue.take(lost[0])
    again = waiter("b", 0, priority=-1, kept=True)
    assert queue.add(again) == []
    assert queue.add(waiter("c", 0, priority=-2, kept=True)) != []
    assert len(queue) == MAX_KEPT
    assert queue.find_inconsistencies() == []


def test_no_request_is_removed_for_one_that_exceeds_the_queue_itself() -> None:
    queue = queue_of(*[waiter("a", at, size=10) for at in range(5)], max_bytes=100)
    huge = waiter("b", 9, size=101)
    assert queue.add(huge) == [huge]
    assert (len(queue), queue.num_bytes) == (5, 50)
    assert order(queue)[0].arrived_at == 0


def test_tokens_before_a_new_request_are_those_served_first() -> None:
    queue = queue_of(
        waiter("urgent", priority=-1, cost=7),
        *[waiter("noisy", at, cost=100) for at in range(5)],
        waiter("me", cost=20),
        waiter("late", priority=1, cost=1000),
    )
    assert queue.tokens_before("me", 0, 30) == 7 + 20 + (20 + 30)
    assert queue.tokens_before("noisy", 0, 30) == 7 + 500 + 20
    assert queue.tokens_before("late", 1, 1) == 7 + 520 + 1000


def test_the_memory_for_keys_that_left_is_bounded() -> None:
    queue = queue_of(waiter("stays", 0, cost=10**9))
    queue.add(waiter("stays", 1))
    for number in range(3 * MAX_START_TAGS):
        queue.add(waiter(str(number), 2, cost=5))
        first = queue.first()
        assert first is not None
        queue.take(first)
    (band,) = queue._levels.values()
    assert len(band._start_tags) <= MAX_START_TAGS


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), num_quiet=st.integers(1, 12), max_requests=st.sampled_from([24, 60, 10_000]))
def test_a_key_with_ten_times_the_requests_gets_the_same_share(seed: int, num_quiet: int, max_requests: int) -> None:
    """All keys always have more requests; on a simulated clock, they get equal numbers of tokens."""
    rng = random.Random(seed)
    queue: FairQueue[Waiter] = FairQueue(max_requests, 10**9)
    demand = {"noisy": 10} | {f"quiet-{number}": 1 for number in range(num_quiet)}
    served: Counter[str] = Counter()
    now = 0.0
    for _ in range(500):
        arrivals = [key for key, count in demand.items() for _ in range(count)]
        rng.shuffle(arrivals)
        for key in arrivals:
            now += 0.001
            queue.add(waiter(key, now, cost=rng.randint(20, 400)))
        for _ in range(max(1, len(demand) * 2 // 3)):
            first = queue.first()
            assert first is not None
            queue.take(first)
            served[first.key] += first.cost_tokens
    assert jain([served[key] for key in demand]) >= 0.95
    assert not queue.find_inconsistencies()


@settings(max_examples=num_examples(60), deadline=None)
@given(data=st.data(), max_requests=st.integers(0, 6), max_bytes=st.integers(0, 40))
def test_no_request_is_lost_and_the_limits_always_hold(data: st.DataObject, max_requests: int, max_bytes: int) -> None:
    queue: FairQueue[Waiter] = FairQueue(max_requests, max_bytes)
    inside: set[Waiter] = set()
    for step in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "add", "add", "take", "remove", "expire", "shrink"]))
        if action == "add":
            newcomer = waiter(
                data.draw(st.sampled_from("abc")),
                data.draw(st.integers(0, 5)),
                priority=data.draw(st.integers(-1, 1)),
                cost=data.draw(st.integers(0, 50)),
                size=data.draw(st.integers(0, 15)),
                expires_at=data.draw(st.integers(0, 40)),
                kept=data.draw(st.sampled_from([False, False, False, True])),
            )
            lowest = max((each.priority for each in (*inside, newcomer) if not each.kept), default=None)
            gone = queue.add(newcomer)
            inside = (inside | {newcomer}) - set(gone)
            assert newcomer not in gone or gone == [newcomer]
            assert gone in ([], [newcomer]) or gone[0].priority == lowest
            assert not any(each.kept for each in gone)
        elif action == "take" and inside:
            first = queue.first()
            assert first in inside
            assert first.priority == min(each.priority for each in inside)
            queue.take(first)
            inside.remove(first)
        elif action == "remove" and inside:
            leaver = data.draw(st.sampled_from(list(queue)))
            queue.remove(leaver)
            inside.remove(leaver)
        elif action == "expire":
            for late in queue.expired(step):
                assert late.expires_at <= step
                queue.remove(late)
                inside.remove(late)
        elif action == "shrink" and not inside:
            queue.max_requests = data.draw(st.integers(0, 6))
        assert set(queue) == inside
        assert queue.find_inconsistencies() == []
    assert set(order(queue)) == inside


def test_an_unknown_request_cannot_be_removed() -> None:
    queue = queue_of(waiter())
    queue.remove(waiter())
    assert len(queue) == 1
    with pytest.raises(KeyError):
        queue.take(waiter("b"))
