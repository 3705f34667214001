"""Requests that arrive at once begin in several turns of the event loop, in order, and few begin at once."""

from __future__ import annotations

import asyncio

from pagemill_servers.connection_limits import Turns


async def test_few_requests_begin_at_once() -> None:
    turns, begun, loop = Turns(3), list[int](), asyncio.get_running_loop()
    for number in range(3):
        turns.begin(lambda number=number: begun.append(number), loop)
    assert begun == [0, 1, 2]


async def test_many_begin_in_order_and_a_bounded_number_in_each_turn() -> None:
    turns, begun, loop = Turns(3), list[int](), asyncio.get_running_loop()
    for number in range(10):
        turns.begin(lambda number=number: begun.append(number), loop)
    counts = [len(begun)]
    while len(begun) < 10:
        await asyncio.sleep(0)
        counts.append(len(begun))
    assert begun == list(range(10))
    assert counts == [3, 6, 9, 10]


async def test_a_request_in_a_later_turn_begins_behind_those_that_wait() -> None:
    turns, begun, loop = Turns(1), list[int](), asyncio.get_running_loop()
    for number in range(3):
        turns.begin(lambda number=number: begun.append(number), loop)
    await asyncio.sleep(0)
    turns.begin(lambda: begun.append(3), loop)
    for _ in range(3):
        await asyncio.sleep(0)
    assert begun == [0, 1, 2, 3]
    turns.begin(lambda: begun.append(4), loop)
    await asyncio.sleep(0)
    assert begun == [0, 1, 2, 3, 4]
