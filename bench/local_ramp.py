"""Raises the load until three real engines run, and ends it: `pagemill up` scales 1 to 3 to 1, and no request fails.

One client sends requests, streamed and whole alternately; every `--step` seconds another client joins, up to
`NUM_CLIENTS`, which is more than two replicas run at once. Some time after three replicas are ready, all clients but
one leave. Reports when replicas were ordered, ready and gone, and the time to the first token by phase. Every text is
compared with an undisturbed engine's. Exits with 1 if an answer failed, or if three replicas, or one again, were not
reached in time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from exact_load import ExactLoad, Record
from local_replicas import Up, serving
from report import emit, markdown_table
from workload import MODEL
from zero_cycles import percentile

NAME = "smollm2"
MOST_REPLICAS = 3
NUM_CLIENTS = 16
NUM_TOKENS = 24
POLL_S = 0.25
DEPLOYMENT = """\
apiVersion: pagemill.dev/v1beta1
kind: LLMDeployment
metadata:
  name: {name}
spec:
  model: {{source: "{model}", name: {name}}}
  engine: {{maxModelLen: 512, maxNumSeqs: 4, kvCacheMemory: 64Mi, deterministic: true}}
  resources: {{gpus: 0}}
  autoscaling:
    minReplicas: 1
    maxReplicas: {most}
    targets: {{queueDepth: 2}}
    behavior: {{scaleDown: {{stabilizationWindowSeconds: {window_s}}}}}
  routing: {{queue: {{timeout: 120s}}}}
"""
COLUMNS = ["phase", "seconds", "answers", "failed", "TTFT p50 ms", "p95 ms", "max ms"]


class Event(NamedTuple):
    at_s: float
    """Seconds since the load began."""
    words: str


class Phase(NamedTuple):
    name: str
    begin_s: float
    """Monotonic time."""


@dataclass
class Watch:
    """Watches the ordered and the ready replicas."""

    up: Up
    begun_s: float = field(default_factory=time.monotonic)
    events: list[Event] = field(default_factory=list)
    ready: int = 1
    running: int = 1
    _num_ordered: int = 0
    _looked: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self) -> None:
        while True:
            await asyncio.to_thread(self._look)
            async with self._looked:
                self._looked.notify_all()
            await asyncio.sleep(POLL_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self._looked:
            await self._looked.wait_for(condition)

    def _look(self) -> None:
        ordered = self.up.scalings(NAME)
        for before, after in ordered[self._num_ordered :]:
            self._note(f"{before} to {after} ordered")
        self._num_ordered = len(ordered)
        replicas = list(self.up.replicas().values())
        ready = sum(each.ready for each in replicas)
        if ready != self.ready:
            self._note(f"{ready} ready")
        if len(replicas) < self.running:
            self._note(f"{len(replicas)} running")
        self.ready, self.running = ready, len(replicas)

    def _note(self, words: str) -> None:
        self.events.append(Event(time.monotonic() - self.begun_s, words))
        sys.stderr.write(f"{self.events[-1].at_s:6.1f} s  {words}\n")


class Clients:
    """A variable number of clients, each with one request at a time."""

    def __init__(self, load: ExactLoad) -> None:
        self._load = load
        self._wanted = 0
        self._tasks: list[asyncio.Task[None]] = []

    def want(self, count: int) -> None:
        self._wanted = count
        self._tasks += [asyncio.create_task(self._ask_on(number)) for number in range(len(self._tasks), count)]

    async def end(self) -> None:
        """Stop sending and wait for the requests in flight."""
        self._wanted = 0
        await asyncio.gather(*self._tasks)

    async def _ask_on(self, number: int) -> None:
        turn, prompts = number, self._load.prompts
        while number < self._wanted:
            await self._load.ask(prompts[turn % len(prompts)], streamed=(turn + turn // len(prompts)) % 2 == 0)
            turn += NUM_CLIENTS + 1


async def play(up: Up, url: str, args: argparse.Namespace) -> tuple[ExactLoad, list[Phase], Watch]:
    load = ExactLoad(url, NAME, 1, NUM_TOKENS)
    try:
        await load.learn()
        watch, clients, phases = Watch(up), Clients(load), list[Phase]()
        watching = asyncio.create_task(watch.run())
        try:
            async with asyncio.timeout(args.limit):
                phases.append(Phase("one client", time.monotonic()))
                clients.want(1)
                await asyncio.sleep(args.hold)
                phases.append(Phase(f"rising to {NUM_CLIENTS}", time.monotonic()))
                await _rise(clients, watch, args.step)
                phases.append(Phase(f"{NUM_CLIENTS} clients, {MOST_REPLICAS} ready", time.monotonic()))
                await asyncio.sleep(args.hold)
                phases.append(Phase("one client again", time.monotonic()))
                clients.want(1)
                await watch.until(lambda: watch.running == 1)
        finally:
            phases.append(Phase("end", time.monotonic()))
            await clients.end()
            watching.cancel()
    finally:
        await load.close()
    return load, phases, watch


async def _rise(clients: Clients, watch: Watch, step_s: float) -> None:
    for count in range(2, NUM_CLIENTS + 1):
        clients.want(count)
        await asyncio.sleep(step_s)
    await watch.until(lambda: watch.ready == MOST_REPLICAS)


def table_rows(records: Sequence[Record], phases: Sequence[Phase]) -> list[list[str]]:
    """Return a row per phase, by when requests were sent; the last of `phases` marks the end."""
    rows = []
    for phase, following in pairwise(phases):
        sent = [each for each in records if phase.begin_s <= each.sent_s < following.begin_s]
        failed = sum(each.outcome != "complete" for each in sent)
        ttfts_ms = sorted(1000 * each.ttft_s for each in sent if each.ttft_s is not None)
        shares = [f"{percentile(ttfts_ms, percent):.0f}" for percent in (50, 95, 100)]
        rows.append([phase.name, f"{following.begin_s - phase.begin_s:.0f}", str(len(sent)), str(failed), *shares])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=2.0, help="seconds from one more client to the next")
    parser.add_argument(
        "--hold", type=float, default=30.0, help="seconds with one client, and with all clients on three replicas"
    )
    parser.add_argument("--window", type=int, default=20, help="stabilization window for scaling down, in seconds")
    parser.add_argument("--limit", type=float, default=360.0, help="seconds after which the benchmark fails")
    args = parser.parse_args()
    document = DEPLOYMENT.format(name=NAME, model=MODEL, most=MOST_REPLICAS, window_s=args.window)
    with serving(document, 1) as (up, url):
        load, phases, watch = asyncio.run(play(up, url, args))
    report(load, phases, watch)


def report(load: ExactLoad, phases: Sequence[Phase], watch: Watch) -> None:
    rows = table_rows(load.records, phases)
    result: dict[str, Any] = {
        "events": [[round(event.at_s, 1), event.words] for event in watch.events],
        "outcomes": load.counts(),
        "faults": [each._asdict() for each in load.faults[:5]],
    }
    emit("local_ramp", COLUMNS, rows, result)
    print(markdown_table(COLUMNS, rows))
    print(markdown_table(["at s", "replicas"], [[f"{event.at_s:.1f}", event.words] for event in watch.events]))
    if load.faults:
        raise SystemExit(f"{len(load.faults)} of {len(load.records)} answers are not as they were: {load.faults[0]}")


if __name__ == "__main__":
    main()
