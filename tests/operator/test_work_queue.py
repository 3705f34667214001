"""The queue of owner keys: coalescing, spacing, backing off; with a clock that only the test moves."""

from __future__ import annotations

import asyncio

import pytest
from hand_clock import Clock
from waiting import WAIT_LIMIT_S

from pagemill_operator.controller.queue import WorkQueue


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue:
    return WorkQueue(min_interval_s=1.0, backoff_first_s=0.5, backoff_longest_s=8.0, clock=clock)


async def taken(queue: WorkQueue) -> str | None:
    """The next key, or None where nothing is due."""
    try:
        async with asyncio.timeout(0.01):
            return await queue.take()
    except TimeoutError:
        return None


async def test_many_additions_of_a_key_are_one_turn(queue: WorkQueue) -> None:
    for _ in range(10):
        queue.add("a")
    assert await taken(queue) == "a"
    queue.finish("a")
    assert await taken(queue) is None


async def test_keys_come_in_the_order_in_which_they_were_added(queue: WorkQueue) -> None:
    for key in "cab":
        queue.add(key)
    assert [await taken(queue) for _ in range(3)] == ["c", "a", "b"]


async def test_a_key_that_comes_in_during_its_turn_runs_once_more_afterwards(queue: WorkQueue, clock: Clock) -> None:
    queue.add("a")
    assert await taken(queue) == "a"
    queue.add("a")
    queue.add("a")
    clock.now += 5
    assert await taken(queue) is None, "a key is not worked on twice at once"
    queue.finish("a")
    assert await taken(queue) == "a"
    queue.finish("a")
    clock.now += 5
    assert await taken(queue) is None


async def test_two_turns_of_a_key_start_at_least_an_interval_apart(queue: WorkQueue, clock: Clock) -> None:
    queue.add("a")
    await queue.take()
    queue.finish("a")
    queue.add("a")
    clock.now += 0.9
    assert await taken(queue) is None
    clock.now += 0.1
    assert await taken(queue) == "a"


async def test_an_earlier_time_replaces_a_later_one_and_never_the_reverse(queue: WorkQueue, clock: Clock) -> None:
    queue.add("a", 600)
    queue.add("a", 2)
    queue.add("a", 300)
    clock.now += 2
    assert await taken(queue) == "a"
    queue.finish("a")
    clock.now += 1000
    assert await taken(queue) is None


async def test_pauses_double_with_each_failure_up_to_the_longest_and_start_anew_after_a_success(
    queue: WorkQueue,
) -> None:
    assert [queue.add_failed("a") for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert queue.add_failed("a", longest_s=3.0) == 3.0
    queue.succeeded("a")
    assert queue.add_failed("a") == 0.5


async def test_depth_counts_what_is_due_and_not_what_is_to_come(queue: WorkQueue, clock: Clock) -> None:
    queue.add("a")
    queue.add("b", 600)
    assert len(queue) == 1
    clock.now += 600
    assert len(queue) == 2


async def test_a_forgotten_key_does_not_come_back(queue: WorkQueue, clock: Clock) -> None:
    queue.add("a", 5)
    queue.forget("a")
    clock.now += 10
    assert await taken(queue) is None


async def test_a_waiting_worker_is_woken_by_an_addition(queue: WorkQueue) -> None:
    worker = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add("a")
    assert await asyncio.wait_for(worker, WAIT_LIMIT_S) == "a"


async def test_the_age_of_the_oldest_turn_is_known(queue: WorkQueue, clock: Clock) -> None:
    assert queue.longest_running_s() == 0
    queue.add("a")
    await queue.take()
    clock.now += 30
    queue.add("b")
    await queue.take()
    clock.now += 10
    assert queue.longest_running_s() == 40
