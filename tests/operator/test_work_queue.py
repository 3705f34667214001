"""The queue of owner keys: coalescing, spacing and back-off, with a clock that the test controls."""

from __future__ import annotations

import asyncio

import pytest
from hand_clock import Clock
from waiting import WAIT_LIMIT_S

from pagemill_operator.controller.leading.queue import WorkQueue


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue:
    return WorkQueue(min_interval_s=1.0, backoff_first_s=0.5, backoff_longest_s=8.0, clock=clock)


async def taken(queue: WorkQueue) -> str | None:
    """Return the next key, or None if none is due."""
    try:
        async with asyncio.timeout(0.01):
            return await queue.take()
    except TimeoutError:
        return None


async def test_several_additions_of_a_key_give_one_turn(queue: WorkQueue) -> None:
    for _ in range(10):
        queue.add("a")
    assert await taken(queue) == "a"
    queue.finish("a")
    assert await taken(queue) is None


async def test_keys_are_returned_in_the_order_of_their_additions(queue: WorkQueue) -> None:
    for key in "cab":
        queue.add(key)
    assert [await taken(queue) for _ in range(3)] == ["c", "a", "b"]


async def test_a_key_added_during_its_turn_runs_once_more_afterwards(queue: WorkQueue, clock: Clock) -> None:
    queue.add("a")
    assert await taken(queue) == "a"
    queue.add("a")
    queue.add("a")
    clock.now += 5
    assert await taken(queue) is None, "a key must not be processed twice at once"
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


async def test_pauses_double_with_each_failure_up_to_a_maximum_and_are_reset_by_a_success(
    queue: WorkQueue,
) -> None:
    assert [queue.add_failed("a") for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert queue.add_failed("a", longest_s=3.0) == 3.0
    queue.succeeded("a")
    assert queue.add_failed("a") == 0.5


async def test_depth_counts_the_keys_that_are_due_only(queue: WorkQueue, clock: Clock) -> None:
    queue.add("a")
    queue.add("b", 600)
    assert len(queue) == 1
    clock.now += 600
    assert len(queue) == 2


async def test_a_removed_key_does_not_return(queue: WorkQueue, clock: Clock) -> None:
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
