"""Stops an engine process (SIGSTOP) and measures how long each stream pauses until another engine continues it.

`pagemill up` serves two replicas of the embedded model in float32 with `deterministic`, so that every text can be
compared with the undisturbed one. With `--watch SECONDS` nothing is stopped: every continued stream is a false alarm.
With `--busy N`, N processes compute meanwhile. Exits with 1 if an answer differs, a pause is too long or an alarm was
false. `local_replicas` finds the replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from exact_load import EXACT_DEPLOYMENT, ExactLoad
from local_replicas import Replica, Up, serving
from report import emit
from workload import MODEL

NAME = "smollm2"
LIMIT_S = 10.0
PROGRESS_S = 120.0


@contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """Run processes that compute all the time."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def processes_of(replica: Replica, *, whole: bool) -> list[psutil.Process]:
    """Return the processes below a replica's server; with `whole`, the server too."""
    server = psutil.Process(replica.pid)
    return [*server.children(recursive=True), *([server] if whole else [])]


async def stop_one(up: Up, load: ExactLoad, args: argparse.Namespace) -> list[float]:
    """Stop the engine process of one replica under streams; return the longest pause of each."""
    running = [asyncio.create_task(load.ask(prompt, streamed=True)) for prompt in load.prompts[: args.streams]]
    await asyncio.sleep(args.after)
    replicas = await asyncio.to_thread(up.replicas)
    stopped = processes_of(replicas[f"{NAME}-{args.replica}"], whole=args.whole)
    for process in stopped:
        process.suspend()
    sys.stderr.write(f"stopped {[(each.pid, each.name()) for each in stopped]}\n")
    try:
        records = await asyncio.gather(*running)
    finally:
        for process in stopped:
            process.resume()
    return [each.longest_pause_s for each in records]


async def watch(up: Up, load: ExactLoad, seconds: float) -> None:
    """Report progress regularly, so that an interrupted run has a result as well."""
    running = asyncio.create_task(load.run())
    start_s = time.monotonic()
    while not running.done() and (left_s := start_s + seconds - time.monotonic()) > 0:
        await asyncio.wait([running], timeout=min(left_s, PROGRESS_S))
        alarms = await asyncio.to_thread(continued, up)
        longest_s = max((each.longest_pause_s for each in load.records), default=0.0)
        sys.stderr.write(
            f"{time.monotonic() - start_s:5.0f} s: {load.counts()}, {alarms:.0f} continued elsewhere, "
            f"longest pause {longest_s:.1f} s, load {os.getloadavg()[0]:.1f}\n"
        )
    load.stop()
    await running


async def play(up: Up, url: str, args: argparse.Namespace) -> tuple[ExactLoad, list[list[float]]]:
    load, pauses = ExactLoad(url, NAME, args.streams, args.tokens), []
    try:
        await load.learn()
        with busy(args.busy):
            if args.watch:
                await watch(up, load, args.watch)
            for _ in range(0 if args.watch else args.rounds):
                pauses.append(await stop_one(up, load, args))
                sys.stderr.write(
                    f"{time.strftime('%H:%M:%S')} longest pauses {[round(each, 1) for each in pauses[-1]]}\n"
                )
                await asyncio.to_thread(up.wait_ready, 2)
    finally:
        await load.close()
    return load, pauses


def continued(up: Up) -> float:
    """Return the gateway's count of migrated answers."""
    found = re.findall(r"^pagemill_gateway_migrations_total\{.*\} (\S+)$", up.metrics(), re.MULTILINE)
    return sum(map(float, found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=200, help="number of tokens of every answer")
    parser.add_argument("--after", type=float, default=2.0, help="seconds from the first stream to the stop")
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--whole", action="store_true", help="also stop the server process")
    parser.add_argument("--busy", type=int, default=0, help="number of processes that compute at the same time")
    parser.add_argument(
        "--watch", type=float, default=0.0, help="stop nothing, and count false alarms for this many seconds"
    )
    args = parser.parse_args()
    with serving(EXACT_DEPLOYMENT.format(name=NAME, model=MODEL, replicas=2), 2) as (up, url):
        load, pauses = asyncio.run(play(up, url, args))
        num_continued = continued(up)
    report(load, pauses, num_continued, args)


def report(load: ExactLoad, pauses: list[list[float]], num_continued: float, args: argparse.Namespace) -> None:
    longest_s = max((max(each) for each in pauses), default=0.0)
    result: dict[str, Any] = {
        "load": os.getloadavg(),
        "outcomes": load.counts(),
        "pauses_s": pauses,
        "longest_pause_s": max((each.longest_pause_s for each in load.records), default=0.0),
        "continued": num_continued,
        "faults": [each._asdict() for each in load.faults[:5]],
    }
    rows = [[number, len(each), round(max(each), 1)] for number, each in enumerate(pauses)]
    emit("stalled", ["round", "streams", "longest pause, s"], rows, result)
    if load.faults:
        raise SystemExit(f"{len(load.faults)} of {len(load.records)} answers are not as they were: {load.faults[0]}")
    if args.watch and num_continued:
        raise SystemExit(f"{num_continued:.0f} false alarms in {args.watch:.0f} s")
    if longest_s > LIMIT_S:
        raise SystemExit(f"a stream paused for {longest_s:.1f} s; at most {LIMIT_S:.0f} s are allowed")


if __name__ == "__main__":
    main()
