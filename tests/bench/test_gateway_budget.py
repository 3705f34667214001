"""The budget of a streamed request: how much the gateway does for it is counted, so that nothing is added unseen.

Counts are the same on every machine. Who raises a bound on purpose says why in docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop
from gateway_budget import NUM_TOKENS, count, on_stage, trace
from routers.budget import ENTRIES, RELAYS, REST, Count, Counts

BOUNDS = {
    "head": Count(33, 20),
    "body": Count(18, 12),
    "key": Count(10, 15),
    "schema": Count(97, 155),
    "render": Count(86, 48),
    "tokenize": Count(42, 150),
    "hash": Count(47, 41),
    "limits": Count(112, 75),
    "decide": Count(435, 395),
    "dispatch": Count(25, 24),
    RELAYS: Count(668, 1100),
    "log": Count(36, 32),
    "metrics": Count(123, 82),
    REST: Count(395, 345),
}
"""Calls of Python functions and of built-in ones: what they are now and a few percent."""
MAX_BLOCKS_HELD = 720
"""Of memory, by one stream from its first frame on."""


def run(work: Any, *, has_link: bool = True) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(on_stage(has_link, work))


async def counted(around: Any, bodies: Any) -> Counts:
    return await count(around, bodies[0])


def test_a_request_makes_no_more_calls_than_its_budget() -> None:
    counts = run(counted)
    assert {*counts.python, *counts.native} == set(BOUNDS) == {*ENTRIES, REST}
    for entry, bound in BOUNDS.items():
        assert counts[entry].python <= bound.python, (entry, counts[entry], counts.functions.most_common(60))
        assert counts[entry].native <= bound.native, (entry, counts[entry])


@pytest.mark.parametrize("has_link", [True, False])
def test_a_plain_stream_has_one_task_and_one_write_for_each_event(has_link: bool) -> None:
    traces = run(lambda around, bodies: trace(around, bodies[1]), has_link=has_link)
    assert traces.num_tasks <= 1
    # Besides: the request to the engine, the head, the last event, and the end of the body.
    assert traces.num_writes <= NUM_TOKENS + 4


def test_a_stream_holds_little_memory_and_leaves_nothing_to_the_garbage_collector() -> None:
    """Whose pauses hold up the first tokens of other requests."""
    traces = run(lambda around, bodies: trace(around, bodies[1]))
    assert traces.num_left_to_collector == 0
    assert traces.num_blocks_held <= MAX_BLOCKS_HELD


def test_relaying_over_a_link_takes_fewer_calls_than_over_http() -> None:
    """As to engines of the version before."""
    over_link, over_http = (
        sum(counts[entry].python for entry in (RELAYS, REST)) for counts in (run(counted), run(counted, has_link=False))
    )
    assert over_link < 0.6 * over_http
