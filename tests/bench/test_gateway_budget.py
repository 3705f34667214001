"""The gateway's work for a streamed request is counted and limited, so that additional work is noticed.

Counts are the medians of several requests: timers that fall into a request add calls to it, more of them on a slow
machine. A change that raises a limit explains it in docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from statistics import median
from typing import Any

import pytest
import uvloop
from gateway_budget import NUM_TOKENS, Traces, count, on_stage, trace
from report import ROOT
from routers.budget import ACCEPT, BENCH, END, FIRST_FRAME, PARTS, RELAYS, REST, ROWS, Count, Counts

BOUNDS = {
    ACCEPT: Count(40, 24, 0),
    "head": Count(50, 38, 1),
    "body": Count(21, 19, 0),
    "key": Count(15, 17, 0),
    "schema": Count(97, 155, 0),
    "render": Count(92, 51, 0),
    "tokenize": Count(18, 44, 0),
    "hash": Count(47, 41, 0),
    "limits": Count(113, 76, 0),
    "decide": Count(415, 380, 0),
    "dispatch": Count(28, 17, 1),
    FIRST_FRAME: Count(80, 110, 2),
    RELAYS: Count(450, 905, 2 * (NUM_TOKENS - 1)),
    END: Count(109, 69, 2),
    "log": Count(36, 32, 1),
    "metrics": Count(137, 96, 0),
    REST: Count(240, 232, 0),
}
"""Calls of Python functions, of built-in ones, and reads and writes: the current numbers plus a few percent."""
MAX_ALLOCATIONS = {REST: 2260, FIRST_FRAME: 180, RELAYS: 990, END: 372}
"""Limits until the request is with its engine, for its first frame, for later frames, and for its end."""
NUM_COUNTED = 9
MAX_BLOCKS_HELD = 815
"""The memory blocks of one stream from its first frame on."""


def run(work: Any) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(on_stage(work))


async def counted(around: Any, bodies: Any) -> list[Counts]:
    return [await count(around, bodies[number]) for number in range(NUM_COUNTED)]


def test_a_request_makes_no_more_calls_than_its_budget() -> None:
    counts = run(counted)
    for each in counts:
        assert {*each.python, *each.native} - {BENCH} == set(BOUNDS) == set(ROWS)
    for entry, bound in BOUNDS.items():
        found = Count(*(median(values) for values in zip(*(each[entry] for each in counts), strict=True)))
        assert found.python <= bound.python, (entry, found, counts[0].functions.most_common(60))
        assert found.native <= bound.native, (entry, found)
        assert found.system <= bound.system, (entry, found)


@pytest.mark.slow
def test_a_request_makes_no_more_allocations_than_its_budget() -> None:
    """The test uses a process of its own, whose allocators count."""
    command = [sys.executable, str(ROOT / "bench" / "gateway_budget.py"), "--requests", "1"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    allocations = json.loads(output.splitlines()[-1])["allocations"]
    assert set(allocations) == set(MAX_ALLOCATIONS) == set(PARTS)
    for part, bound in MAX_ALLOCATIONS.items():
        assert 0 < allocations[part] <= bound, (part, allocations)


def test_a_plain_stream_needs_one_task_and_one_write_per_event() -> None:

    async def traced(around: Any, bodies: Any) -> list[Traces]:
        return [await trace(around, bodies[number]) for number in range(1, 6)]

    traces = run(traced)
    assert median(each.num_tasks for each in traces) <= 1
    # There are also the request to the engine, and the last event with the end of the body.
    assert median(each.num_writes for each in traces) <= NUM_TOKENS + 2


def test_a_stream_uses_little_memory_and_leaves_no_garbage_cycles() -> None:
    """The collector's pauses delay the first tokens of other requests. Some streams also grow tables that remain."""

    async def traced(around: Any, bodies: Any) -> list[Traces]:
        return [await trace(around, bodies[number]) for number in range(1, 6)]

    traces = run(traced)
    assert median(each.num_left_to_collector for each in traces) == 0
    assert min(each.num_blocks_held for each in traces) <= MAX_BLOCKS_HELD
