"""Threads that prepare bodies: large bodies take turns, and small ones do not wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from pagemill_servers.preparation_threads import LARGE_BODY_BYTES, PreparationThreads

LARGE = LARGE_BODY_BYTES + 1


@pytest.fixture
async def threads() -> AsyncIterator[PreparationThreads]:
    made = PreparationThreads(2)
    yield made
    made.close()


async def test_large_bodies_are_prepared_one_at_a_time_and_small_ones_concurrently(threads: PreparationThreads) -> None:
    begun: list[str] = []
    gate = threading.Event()

    def work(name: str) -> str:
        begun.append(name)
        assert gate.wait(30)
        return name

    large = [asyncio.create_task(threads.run(lambda name=name: work(name), LARGE)) for name in ("first", "second")]
    for number in range(20):
        assert await threads.run(lambda number=number: number, LARGE_BODY_BYTES) == number
    assert begun == ["first"]
    gate.set()
    assert await asyncio.gather(*large) == begun == ["first", "second"]


async def test_a_large_body_whose_client_left_before_its_turn_is_not_prepared(threads: PreparationThreads) -> None:
    gate = threading.Event()
    begun = threading.Event()
    first = asyncio.create_task(threads.run(lambda: gate.wait(30), LARGE))
    left = asyncio.create_task(threads.run(begun.set, LARGE))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    gate.set()
    assert await first
    await threads.run(lambda: None, LARGE)
    assert not begun.is_set()
