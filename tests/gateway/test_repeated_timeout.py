"""Repeated short waits of one task with one timeout: each has the whole limit, and other cancellations pass through."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from waiting import WAIT_LIMIT_S

from pagemill_gateway.repeated_timeout import RepeatedTimeout

LIMIT_S = 0.05


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def turns(count: int) -> int:
    """Return after this number of turns of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)
    return count


def run(scenario: Callable[[RepeatedTimeout], Awaitable[None]]) -> None:
    async def main() -> None:
        patience = RepeatedTimeout(LIMIT_S)
        try:
            async with asyncio.timeout(WAIT_LIMIT_S):
                await scenario(patience)
        finally:
            patience.close()

    asyncio.run(main())


def test_a_result_and_an_error_in_time_are_passed_on() -> None:
    async def scenario(patience: RepeatedTimeout) -> None:
        assert await patience.wait(turns(0)) == 0
        assert await patience.wait(turns(3)) == 3
        with pytest.raises(KeyError):
            await patience.wait(failing())

    async def failing() -> None:
        raise KeyError

    run(scenario)


def test_each_wait_has_the_whole_limit() -> None:
    """The number of earlier waits that ended in time does not matter."""

    async def scenario(patience: RepeatedTimeout) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(2):
            end = loop.time() + 1.5 * LIMIT_S
            while loop.time() < end:
                await patience.wait(turns(1))
            began_at = loop.time()
            with pytest.raises(TimeoutError):
                await patience.wait(never())
            assert loop.time() - began_at >= LIMIT_S * 0.99
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0

    run(scenario)


def test_a_cancellation_from_outside_is_no_timeout() -> None:
    async def scenario(patience: RepeatedTimeout) -> None:
        waiting = asyncio.create_task(patience.wait(never()))
        await turns(2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await patience.wait(turns(2)) == 2

    run(scenario)


def test_an_outer_timeout_that_expires_first_ends_the_wait() -> None:
    async def scenario(_: RepeatedTimeout) -> None:
        patience = RepeatedTimeout(60.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                await patience.wait(never())
        assert await patience.wait(turns(2)) == 2
        patience.close()

    run(scenario)


def test_two_concurrent_waits_have_separate_limits() -> None:
    async def scenario(patience: RepeatedTimeout) -> None:
        first, second = (asyncio.create_task(patience.wait(never())) for _ in range(2))
        done, _ = await asyncio.wait([first, second])
        assert {type(each.exception()) for each in done} == {TimeoutError}

    run(scenario)
