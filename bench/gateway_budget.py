"""What one streamed request of 32 chunks costs the gateway, step by step: CPU time, Python calls and allocations.

Client and engines are calls in the same process (`routers.in_memory`), so the figures are the gateway's own work; the
kernel's part is counted in `gateway_overhead`. CPU is that of the event loop's thread: a process that renders templates
is not in it. `--http` has the engines offer no link.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import uvloop
from report import ROOT, emit, median
from routers import prompts
from routers.catalogue import MODEL
from routers.in_memory import Stage, stage

from pagemill_protocol.frames import StateDecoder, encode_state

NUM_TOKENS = 32
NUM_PODS = 20
WARM_UP = 20
STEPS = ("to the engine", "first frame", "relays", "end")
STATE_FRAME = "state frame"


class Count(NamedTuple):
    """Of Python functions, and of built-in ones."""

    python: int
    native: int


async def play(around: Stage, body: bytes, note: Callable[[str], None]) -> None:
    """One request from its first byte to its log line; `note` is called at the end of each step."""
    around.client.data_received(around.request(body))
    exchange = await around.engines.next()
    note("to the engine")
    answer, request = around.answer, exchange.request
    exchange.accept(answer.frame(0, request))
    await around.wire.until()
    note("first frame")
    for number in range(1, answer.num_tokens):
        exchange.send(answer.frame(number, request))
        await around.wire.until()
    note("relays")
    exchange.end(answer.frame_end(request, 0))
    await around.wire.until(b"0\r\n\r\n")
    for _ in range(3):  # log and metrics come after the last byte
        await asyncio.sleep(0)
    note("end")


async def measure(around: Stage, bodies: list[bytes], num_requests: int) -> dict[str, float]:
    """Microseconds of each step, medians."""
    found: dict[str, list[float]] = {}
    for number in range(num_requests):
        started = time.thread_time_ns()

        def note(step: str) -> None:
            nonlocal started
            found.setdefault(step, []).append((time.thread_time_ns() - started) / 1000)
            started = time.thread_time_ns()

        await play(around, bodies[number % len(bodies)], note)
    found[STATE_FRAME] = [_state_frame_us(around) for _ in range(num_requests)]
    return {step: median(values) for step, values in found.items()}


def _state_frame_us(around: Stage) -> float:
    data = encode_state(around.pods[0].snapshot())
    started = time.thread_time_ns()
    (frame,) = StateDecoder().feed(data)
    around.gateway.control.brain.observe("pod-0", frame)
    return (time.thread_time_ns() - started) / 1000


async def count(around: Stage, body: bytes) -> tuple[dict[str, Count], Counter[str]]:
    """Calls in each step, the same for every request of its kind; and which Python functions they are."""
    calls: Counter[str] = Counter()
    per_step: dict[str, Count] = {}
    functions: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> None:
        own = frame.f_code.co_filename
        if "/bench/" in own:
            return
        if event == "call":
            calls["python"] += 1
            functions[f"{own.rpartition('/')[2]}:{frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            calls["native"] += 1

    def note(step: str) -> None:
        per_step[step] = Count(calls["python"], calls["native"])
        calls.clear()

    sys.setprofile(trace)
    try:
        await play(around, body, note)
    finally:
        sys.setprofile(None)
    return per_step, functions


async def on_stage(has_link: bool, work: Callable[[Stage, list[bytes]], Awaitable[Any]]) -> Any:
    """What `work` returns, with a gateway that has served a few requests and writes its log to a file."""
    path = ROOT / ".pagemill" / "peers" / "gateway" / f"bodies-200-{NUM_TOKENS}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        prompts.write_bodies(path, MODEL, 200, NUM_TOKENS)
    bodies = [each.encode() for each in json.loads(path.read_text())]
    async with stage(prompts.bundle(), num_pods=NUM_PODS, num_tokens=NUM_TOKENS, has_link=has_link) as around:
        for number in range(WARM_UP):
            await play(around, bodies[-number], lambda _: None)
        around.observe()
        return await work(around, bodies)


def log_to(path: Path) -> logging.Handler:
    """As a gateway does to its terminal."""
    from pagemill_gateway import logs

    logs.configure()
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.getLogger().handlers[0].formatter)
    logging.getLogger().handlers[:] = [handler]
    return handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--http", action="store_true", help="no link: every request on a connection of its own")
    parser.add_argument("--functions", type=int, default=0, help="show so many of the functions called most")
    args = parser.parse_args()
    folder = ROOT / ".pagemill" / "gate"
    folder.mkdir(parents=True, exist_ok=True)
    log_to(folder / "budget.log")

    async def work(around: Stage, bodies: list[bytes]) -> Any:
        counts, functions = await count(around, bodies[0])
        return await measure(around, bodies, args.requests), counts, functions

    with uvloop_runner() as runner:
        found, counts, functions = runner.run(on_stage(not args.http, work))
    for name, number in functions.most_common(args.functions):
        sys.stderr.write(f"{number:6d} {name}\n")
    rows: list[list[Any]] = [[step, found[step], *counts[step]] for step in STEPS]
    total = sum(found[step] for step in STEPS)
    rows.append(["all", total, *map(sum, zip(*(counts[step] for step in STEPS), strict=True))])
    rows.append([STATE_FRAME, found[STATE_FRAME], 0, 0])
    emit("gateway_budget", ["step", "us", "Python calls", "native calls"], rows, {"us": found, "total_us": total})


def uvloop_runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
    main()
