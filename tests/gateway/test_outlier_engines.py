"""Engines that answer badly (far slower than others, or with garbage) are ejected by what clients received."""

from __future__ import annotations

import asyncio
import time

import pytest

from pagemill_routing.brain.resilience.recovery import FREE_RETRIES, WINDOW_S
from pagemill_routing.brain.resilience.slowness import SLOW_FACTOR

pytestmark = pytest.mark.slow

PIECES = tuple("abcdefghijkl")
NUM_STREAMS = 12
"""The number of streams at each engine, more than a judgement needs."""
CALM = {"state_stale_after_s": 60.0}
"""A long timeout, because reports may be late on a busy machine and these tests do not depend on them."""


def at_pace(fake, ms_per_token: float):
    async def behave(engine, request, response, http) -> None:
        await response.prepare(http)
        for frame in fake.answer_frames(request, PIECES):
            await response.write(frame)
            await asyncio.sleep(ms_per_token / 1000)
        await response.write_eof()

    return behave


def garbage_in_mid_answer(fake):
    async def behave(engine, request, response, http) -> None:
        await response.prepare(http)
        for frame in fake.answer_frames(request, PIECES)[:2]:
            await response.write(frame)
        await asyncio.sleep(0.02)
        await response.write(b"\xff" * 64)
        await response.write_eof()

    return behave


class Ends:
    """Measures the time until a number of streams have ended."""

    def __init__(self, number: int) -> None:
        self._left = number
        self._began_s = time.monotonic()
        self.seconds: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def note(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.seconds.set_result(time.monotonic() - self._began_s)


def far_slower(fake, siblings: Ends):
    """Return a behaviour whose tokens take several times as long as those of the siblings took on this machine."""

    async def behave(engine, request, response, http) -> None:
        await response.prepare(http)
        first, *frames = fake.answer_frames(request, PIECES)
        await response.write(first)
        pause_s = max(0.12, (SLOW_FACTOR + 1) * await siblings.seconds / len(frames))
        for frame in frames:
            await asyncio.sleep(pause_s)
            await response.write(frame)
        await response.write_eof()

    return behave


async def asked(gateway, engines, number: int, ends: Ends | None = None) -> list[int]:
    """Send `number` streams, check that each is complete, and return how many each engine got."""
    before = [len(engine.requests) for engine in engines]
    tasks = [asyncio.create_task(gateway.chat(stream=True)) for _ in range(number)]
    for task in tasks if ends is not None else ():
        task.add_done_callback(lambda _: ends.note())
    replies = await asyncio.gather(*tasks)
    assert [(reply.streamed_text, reply.events[-1]) for reply in replies] == [("".join(PIECES), "[DONE]")] * number
    return [len(engine.requests) - each for engine, each in zip(engines, before, strict=True)]


@pytest.mark.layouts
async def test_an_engine_far_slower_than_its_siblings_is_ejected_and_readmitted(engines, gateways, fake) -> None:
    catalog = fake.catalog_of(*engines, routing_policy="RoundRobin")
    gateway = await gateways(*engines, catalog=catalog, ejection_base_s=0.3, **CALM)
    slow = engines[0]
    siblings = Ends(2 * NUM_STREAMS)
    for engine in engines:
        engine.behaviour = far_slower(fake, siblings) if engine is slow else at_pace(fake, 2.0)
    phase = gateway.gateway.control.brain.reader.phase
    assert await asked(gateway, engines, 3 * NUM_STREAMS, siblings) == [NUM_STREAMS] * 3
    assert phase(gateway.record(slow)) == "ejected"
    assert await asked(gateway, engines, 6) == [0, 3, 3]
    slow.behaviour = at_pace(fake, 2.0)
    await fake.until(lambda: phase(gateway.record(slow)) != "ejected")
    counts = await asked(gateway, engines, 1)  # one of the three may be the one that shows the slowness
    while not counts[0]:
        counts = await asked(gateway, engines, 1)
    assert await asked(gateway, engines, 6) == [2, 2, 2]


async def test_an_engine_whose_answers_become_garbage_is_ejected_and_readmitted(engines, gateways, fake) -> None:
    """No client notices: other engines continue its answers."""
    catalog = fake.catalog_of(*engines, routing_policy="RoundRobin")
    gateway = await gateways(*engines, catalog=catalog, ejection_base_s=4.0, **CALM)
    bad = engines[0]
    for engine in engines:
        engine.behaviour = garbage_in_mid_answer(fake) if engine is bad else fake.says(*PIECES)
    assert (await asked(gateway, engines, 3))[0] == 1
    assert gateway.gateway.control.brain.reader.phase(gateway.record(bad)) == "ejected"
    assert (await asked(gateway, engines, 6))[0] == 0
    bad.behaviour = fake.says(*PIECES)
    await fake.until(lambda: gateway.gateway.control.brain.reader.phase(gateway.record(bad)) != "ejected")
    while not (await asked(gateway, engines, 1))[0]:
        pass
    assert await asked(gateway, engines, 6) == [2, 2, 2]


async def test_of_three_engines_that_all_answer_garbage_one_is_ejected(engines, gateways, fake) -> None:
    """At most 30 % and at least one may be ejected: if all look bad, the fault may be elsewhere."""
    gateway = await gateways(*engines, ejection_base_s=60.0, max_attempts=2, **CALM)
    for engine in engines:
        engine.behaviour = fake.sends(b"\xff" * 64)
    for _ in range(6):
        reply = await gateway.chat()
        assert (reply.status, reply.error["code"]) == (502, "bad_upstream")
    for engine in engines:
        engine.behaviour = fake.says("ok")
    before = [len(engine.requests) for engine in engines]
    assert [(await gateway.chat()).text for _ in range(6)] == ["ok"] * 6
    got = [len(engine.requests) > each for engine, each in zip(engines, before, strict=True)]
    assert sorted(got) == [False, True, True]


@pytest.mark.layouts
async def test_retries_are_limited_when_every_engine_fails(engines, gateways, fake) -> None:
    """Retries are limited to a fifth of the requests, and at least ten; beyond that, failures are returned at once."""
    gateway = await gateways(*engines, ejection_base_s=60.0, **CALM)
    for engine in engines:
        engine.behaviour = fake.refuses(500)
    began_s = time.monotonic()
    replies = [await gateway.chat() for _ in range(80)]
    num_windows = int((time.monotonic() - began_s) / WINDOW_S)
    assert {(reply.status, reply.error["code"]) for reply in replies} == {
        (502, "bad_upstream"),
        (503, "retry_budget_exhausted"),
    }
    assert all(int(reply.headers["retry-after"]) == 1 for reply in replies if reply.status == 503)
    num_tries = sum(len(engine.requests) for engine in engines)
    most = 80 * 1.2 + len(engines) + FREE_RETRIES * num_windows
    assert 80 + FREE_RETRIES <= num_tries <= most, "a retry after the first failure of an engine is free"
