"""Measures the cost of a streamed request of 32 chunks in the gateway: CPU, calls, system calls, allocations by entry.

Client and engines are calls in the same process (`routers.in_memory`), so the figures are the gateway's own work;
`gateway_overhead` also counts the kernel's part. CPU is that of the event loop's thread, without the process that
renders templates.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from report import ROOT, emit, median
from routers import prompts
from routers.allocations import AllocationCounter
from routers.budget import (
    ACCEPT,
    BENCH,
    END,
    ENTRIES,
    FIRST_FRAME,
    PARTS,
    RELAYS,
    REST,
    ROWS,
    Clock,
    Counts,
    Played,
    Times,
)
from routers.catalogue import MODEL
from routers.generator import NONCE
from routers.in_memory import Exchange, Stage, Turns, Wire, stage

from pagemill_protocol.frames import StateDecoder, encode_state

NUM_TOKENS = 32
NUM_PODS = 20
WARM_UP = 64
"""Requests before the measurement, after which the tokenizer knows all words of the bodies."""
STATE_FRAME = "state frame"
ALL = "all"
NOTHING = Played()


class Bodies:
    """Bodies of requests, all different, so that no prompt shares tokens with an earlier one."""

    def __init__(self, bodies: list[bytes]) -> None:
        self._bodies = bodies
        self._numbers = itertools.count()

    def __getitem__(self, number: int) -> bytes:
        fresh = b"%0*d" % (len(NONCE), next(self._numbers))
        return self._bodies[number % len(self._bodies)].replace(NONCE, fresh, 1)


class Traces(NamedTuple):
    """The system calls and allocations of one request."""

    num_writes: int
    """Writes to client and engine; each one is a system call."""
    num_tasks: int
    num_blocks_held: int
    """Blocks of memory that are held while the request streams."""
    num_left_to_collector: int
    """Objects in reference cycles, which only the garbage collector frees."""


async def begin(around: Stage, body: bytes, played: Played) -> Exchange:
    """Run one request from its first byte until the client has its first frame."""
    played.begin(REST)
    around.wire.receive(around.client, around.request(body))
    exchange = await around.engines.next()
    frame = around.answer.frame(0, exchange.request)
    played.begin(FIRST_FRAME)
    exchange.accept(frame)
    await around.wire.until()
    return exchange


async def play(around: Stage, body: bytes, played: Played = NOTHING) -> None:
    """Run one request from its first byte to its log line."""
    exchange = await begin(around, body, played)
    answer, request = around.answer, exchange.request
    played.begin(RELAYS)
    for number in range(1, answer.num_tokens):
        exchange.send(answer.frame(number, request))
        await around.wire.until()
    played.begin(END)
    exchange.end(answer.frame_end(request, 0))
    await around.wire.until(b"0\r\n\r\n")
    for _ in range(3):  # log and metrics come after the last byte
        around.wire.turns.gateway()
        await asyncio.sleep(0)
        around.wire.turns.bench()
    played.begin(REST)


async def measure(around: Stage, bodies: Bodies, num_requests: int) -> dict[str, float]:
    """Return median microseconds of each entry, and of a whole request without wrappers."""
    found: dict[str, list[float]] = {}
    for number in range(num_requests):
        times = Times()
        with times.measuring():
            await play(around, bodies[2 * number], times)
        clock = Clock()
        await play(around, bodies[2 * number + 1], clock)
        taken = {entry: times.ns[entry] for entry in (*ENTRIES, BENCH)}
        # The time of a part that no entry has taken. Both times are from different requests of the same kind.
        taken |= {part: clock.ns[part] - times.parts_ns[part] for part in PARTS}
        taken[ALL] = clock.ns.total() - times.ns[BENCH]
        taken |= {ACCEPT: _accept_ns(around), STATE_FRAME: _state_frame_ns(around)}
        for entry, ns in taken.items():
            found.setdefault(entry, []).append(ns / 1000)
    return {entry: median(values) for entry, values in found.items()}


def _accept_ns(around: Stage) -> int:
    started = time.thread_time_ns()
    client, _ = around.connect()
    taken = time.thread_time_ns() - started
    client.connection_lost(None)
    return taken


def _state_frame_ns(around: Stage) -> int:
    data = encode_state(around.pods[0].snapshot())
    started = time.thread_time_ns()
    (frame,) = StateDecoder().feed(data)
    around.gateway.control.brain.observer.observe("pod-0", frame)
    return time.thread_time_ns() - started


async def count(around: Stage, body: bytes) -> Counts:
    """Return the calls of each entry, and those of timers that end meanwhile."""
    counts = Counts()
    counts.begin(ACCEPT)
    with counts.counting():
        client, _ = around.connect()
    client.connection_lost(None)
    with counts.counting():
        await play(around, body, counts)
    return counts


class Allocations(Played, Turns):
    """Allocations of the gateway's code by part, without accepting the connection."""

    def __init__(self, counter: AllocationCounter) -> None:
        super().__init__()
        self.num: Counter[str] = Counter()
        self._counter = counter
        self._num_before = counter.num

    def begin(self, part: str) -> None:
        self.num[self.part] += self._counter.num - self._num_before
        self._num_before = self._counter.num
        self.part = part

    def gateway(self) -> None:
        self._counter.start()

    def bench(self) -> None:
        self._counter.stop()


async def allocate(around: Stage, bodies: Bodies, counter: AllocationCounter, num_requests: int = 9) -> dict[str, int]:
    """Return the median allocations of each part; some requests also grow tables and caches."""
    found: dict[str, list[int]] = {part: [] for part in PARTS}
    for number in range(num_requests):
        allocations = Allocations(counter)
        Wire.turns = allocations
        try:
            await play(around, bodies[number], allocations)
        finally:
            allocations.bench()
            Wire.turns = Turns()
        for part, values in found.items():
            values.append(allocations.num[part])
    return {part: int(median(values)) for part, values in found.items()}


async def trace(around: Stage, body: bytes) -> Traces:
    tasks: list[Any] = []
    loop = asyncio.get_running_loop()

    def make(loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        tasks.append(coroutine.__qualname__)
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(make)
    try:
        around.wire.num_writes = around.engines.num_writes = 0
        await play(around, body)
    finally:
        loop.set_task_factory(None)
    num_writes, num_tasks = around.wire.num_writes + around.engines.num_writes, len(tasks)
    return Traces(num_writes, num_tasks, await _blocks_held(around, body), await _left_to_collector(around, body))


async def _blocks_held(around: Stage, body: bytes) -> int:
    gc.collect()
    before = sys.getallocatedblocks()
    exchange = await begin(around, body, NOTHING)
    held = sys.getallocatedblocks() - before
    exchange.end(around.answer.frame_end(exchange.request, 0))
    await around.wire.until(b"0\r\n\r\n")
    return held


async def _left_to_collector(around: Stage, body: bytes) -> int:
    while gc.collect():  # finalizers of what was there before may leave more
        pass
    gc.disable()
    try:
        await play(around, body)
        return gc.collect()
    finally:
        gc.enable()


async def on_stage(work: Callable[[Stage, Bodies], Awaitable[Any]]) -> Any:
    """Run `work` with a gateway that has served a few requests and logs to a file; return its result."""
    path = ROOT / ".pagemill" / "peers" / "gateway" / f"bodies-200-{NUM_TOKENS}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        prompts.write_bodies(path, MODEL, 200, NUM_TOKENS)
    bodies = Bodies([each.encode() for each in json.loads(path.read_text())])
    async with stage(prompts.bundle(), num_pods=NUM_PODS, num_tokens=NUM_TOKENS) as around:
        for number in range(WARM_UP):
            await play(around, bodies[-number])
        around.observe()
        return await work(around, bodies)


def log_to(path: Path) -> logging.Handler:
    """Log to the file `path` as a gateway logs to its terminal."""
    from pagemill_gateway import logs

    logs.configure()
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.getLogger().handlers[0].formatter)
    logging.getLogger().handlers[:] = [handler]
    return handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--functions", type=int, default=0, help="show this many of the functions that are called most")
    args = parser.parse_args()
    folder = ROOT / ".pagemill" / "gate"
    folder.mkdir(parents=True, exist_ok=True)
    log_to(folder / "budget.log")

    async def work(around: Stage, bodies: Bodies) -> Any:
        counts = await count(around, bodies[0])
        found, traces = await measure(around, bodies, args.requests), await trace(around, bodies[1])
        return found, counts, traces, await allocate(around, bodies, AllocationCounter(folder))

    with uvloop_runner() as runner:
        found, counts, traces, allocations = runner.run(on_stage(work))
    for name, number in counts.functions.most_common(args.functions):
        sys.stderr.write(f"{number:6d} {name}\n")
    rows = [[entry, found[entry], *counts[entry], allocations.get(entry, "")] for entry in ROWS]
    totals = [sum(values[entry] for entry in ROWS) for values in (counts.python, counts.native, counts.system)]
    rows.append([ALL, found[ALL], *totals, sum(allocations.values())])
    rows.append([STATE_FRAME, found[STATE_FRAME], "", "", "", ""])
    columns = ["entry", "us", "Python calls", "native calls", "system calls", "allocations"]
    emit("gateway_budget", columns, rows, {"us": found, **traces._asdict(), "allocations": allocations})


def uvloop_runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
    main()
