"""The simulation's event loop: asyncio code waits in simulated time, in a reproducible order, and errors are raised."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pagemill_simulator.events import Events, EventsLoop


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def loop(events: Events) -> Iterator[EventsLoop]:
    loop = EventsLoop(events)
    yield loop
    loop.close()


def run(events: Events, loop: EventsLoop, count: int = 1000) -> None:
    """Run until no event is due."""
    loop.run_ready()
    for _ in range(count):
        try:
            events.step()
        except IndexError:
            return
        loop.run_ready()
    raise AssertionError("the simulation never ends")


def test_events_of_one_instant_run_in_the_order_of_their_requests(events: Events) -> None:
    seen: list[object] = []
    events.at(2.0, lambda: seen.append("c"))
    events.at(1.0, lambda: seen.append("a"))
    events.at(1.0, lambda: seen.append("b"))
    for _ in range(3):
        events.step()
    assert seen == ["a", "b", "c"]
    assert events.now_s == 2.0


def test_an_event_in_the_past_runs_now(events: Events) -> None:
    seen: list[object] = []
    events.at(5.0, lambda: events.at(1.0, lambda: seen.append(events.now_s)))
    events.step()
    events.step()
    assert seen == [5.0]


def test_sleeps_and_timeouts_take_simulated_seconds(events: Events, loop: EventsLoop) -> None:
    seen: list[object] = []

    async def sleeps() -> None:
        await asyncio.sleep(3600.0)
        seen.append(("slept", events.now_s))

    async def gives_up() -> None:
        try:
            async with asyncio.timeout(60.0):
                await asyncio.get_running_loop().create_future()
        except TimeoutError:
            seen.append(("gave up", events.now_s))

    loop.spawn(sleeps())
    loop.spawn(gives_up())
    run(events, loop)
    assert seen == [("gave up", 60.0), ("slept", 3600.0)]


def test_a_cancelled_timer_does_not_run(events: Events, loop: EventsLoop) -> None:
    seen: list[object] = []
    loop.call_later(1.0, seen.append, "kept")
    loop.call_later(1.0, seen.append, "cancelled").cancel()
    run(events, loop)
    assert seen == ["kept"]


def test_a_failed_task_fails_the_simulation(events: Events, loop: EventsLoop) -> None:

    async def fails() -> None:
        await asyncio.sleep(1.0)
        raise ValueError("no such pod")

    loop.spawn(fails())
    with pytest.raises(ValueError, match="no such pod"):
        run(events, loop)


def test_closing_cancels_waiting_tasks(events: Events, loop: EventsLoop) -> None:
    seen: list[object] = []

    async def waits() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            seen.append("left")

    loop.spawn(waits())
    loop.run_ready()
    loop.close()
    assert seen == ["left"]
