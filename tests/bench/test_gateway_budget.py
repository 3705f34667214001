"""The budget of a streamed request: how much the gateway does for it is counted, so that nothing is added unseen.

Counts are the same on every machine. Who raises a bound on purpose says why in docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import uvloop
from gateway_budget import NUM_TOKENS, STEPS, Count, count, on_stage, play

BOUNDS = {
    "to the engine": Count(1010, 880),
    "first frame": Count(115, 165),
    "relays": Count(760, 1020),
    "end": Count(325, 255),
}
"""Calls of Python functions and of built-in ones: what they are now and a few percent."""


def run(work: Any, *, has_link: bool = True) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(on_stage(has_link, work))


def test_a_request_makes_no_more_calls_than_its_budget() -> None:
    async def work(around: Any, bodies: list[bytes]) -> tuple[dict[str, Count], Counter[str]]:
        return await count(around, bodies[0])

    counts, functions = run(work)
    assert set(counts) == set(STEPS)
    for step, bound in BOUNDS.items():
        assert counts[step].python <= bound.python, (step, functions.most_common(60))
        assert counts[step].native <= bound.native, step


@pytest.mark.parametrize(("has_link", "most"), [(True, 1), (False, 1)])
def test_a_plain_stream_has_one_task_and_one_write_for_each_event(has_link: bool, most: int) -> None:
    tasks: list[Any] = []
    writes: list[bytes] = []

    async def work(around: Any, bodies: list[bytes]) -> None:
        loop = asyncio.get_running_loop()

        def make(loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
            tasks.append(coroutine)
            return asyncio.Task(coroutine, loop=loop, **options)

        loop.set_task_factory(make)
        write = around.wire.write
        around.wire.write = lambda data: (writes.append(data), write(data))
        await play(around, bodies[0], lambda _: None)
        loop.set_task_factory(None)

    run(work, has_link=has_link)
    assert len(tasks) <= most
    assert len(writes) <= NUM_TOKENS + 3  # the head, the last event, and the end of the body


def test_relaying_over_a_link_takes_fewer_calls_than_over_http() -> None:
    """As to engines of the version before."""

    async def work(around: Any, bodies: list[bytes]) -> tuple[dict[str, Count], Counter[str]]:
        return await count(around, bodies[0])

    over_link, over_http = run(work)[0], run(work, has_link=False)[0]
    assert over_link["relays"].python < 0.6 * over_http["relays"].python
