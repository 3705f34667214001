"""Scales to zero and back repeatedly, and checks that requests that find no replica are answered soon after a start.

`pagemill up` serves the embedded model with `minReplicas: 0` and a short `scaleToZeroAfter`. Requests arrive at random:
when no process is left, while the last one drains, or when its removal is ordered; one or several at once, one more
during the start; streamed and whole. Every text is compared with an undisturbed engine's. With `--simulated N`, N
cycles run in the simulator instead (`zero_simulated`).

The overhead of a waiting request is the time from the engine's readiness, by its own `/readyz`, to the request's first
token (or to the whole answer if it was not streamed), minus the time that the same requests take when they are sent
again together to the ready idle engine (median of several times). Exits with 1 if an answer failed, was cut or differs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from exact_load import ExactLoad, Prompt, Record
from local_replicas import Up, serving
from report import emit, markdown_table, median, progress
from workload import MODEL
from zero_simulated import simulate_cycles

NAME = "smollm2"
IDLE_S = 2.0
"""Seconds of `scaleToZeroAfter`."""
NUM_TOKENS = 8
NUM_AGAIN = 3
POLL_S = 0.02
GOES_TIMEOUT_S = 120.0
Moment = Literal["gone", "leaving", "falling"]
MOMENTS: tuple[Moment, ...] = ("gone", "leaving", "falling")
"""`gone`: no process is left. `leaving`: the removal was ordered. `falling`: `IDLE_S` after the latest answer, plus or
minus a second."""
DEPLOYMENT = """\
apiVersion: pagemill.dev/v1beta1
kind: LLMDeployment
metadata:
  name: {name}
spec:
  model: {{source: "{model}", name: {name}}}
  engine:
    {{maxModelLen: 512, maxNumSeqs: 8, kvCacheMemory: 64Mi, deterministic: true, prefixCaching: {{enabled: false}}}}
  resources: {{gpus: 0}}
  autoscaling: {{minReplicas: 0, maxReplicas: 1, scaleToZeroAfter: {idle_s:g}s}}
  routing: {{queue: {{timeout: 120s}}}}
"""
COLUMNS = ["cycles", "requests", "failed", "cold start p50 s", "p95 s", "over ready p50 ms", "p95 ms", "max ms"]


class Arrival(NamedTuple):
    """The requests of one cycle."""

    moment: Moment
    delay_s: float
    """Seconds after the moment; with `falling` it may be negative."""
    requests: tuple[tuple[Prompt, bool], ...]
    """Requests that are sent at once, each with whether it is streamed."""
    late_s: float | None
    """Seconds from these requests to one more request, if any."""


class Cycle(NamedTuple):
    moment: Moment
    cold_start_s: float | None
    """Seconds from the first request until the replica was ready; None: a replica was still there and took it."""
    overheads_s: tuple[float, ...]
    """Overhead of each request that waited."""


def draw_arrival(source: random.Random, prompts: Sequence[Prompt]) -> Arrival:
    moment = source.choice(MOMENTS)
    delay_s = {
        "gone": source.uniform(0.0, 3.0),
        "leaving": source.uniform(0.0, 0.5),
        "falling": source.uniform(-0.5, 1.5),
    }[moment]
    count = source.choice((1, 1, 2, 3))
    requests = tuple((source.choice(prompts), source.random() < 0.7) for _ in range(count))
    return Arrival(moment, delay_s, requests, source.uniform(0.2, 3.0) if source.random() < 0.3 else None)


def overheads_s(ready_s: float, held: Sequence[Record], again: Sequence[Sequence[Record]]) -> tuple[float, ...]:
    """Return the overhead of each waiting request; `again` are the same requests on the idle engine, several times."""
    usual_s = [median([each.first_s for each in times]) for times in zip(*again, strict=True)]
    return tuple(record.sent_s + record.first_s - ready_s - usual for record, usual in zip(held, usual_s, strict=True))


class Cycles:
    def __init__(self, up: Up, load: ExactLoad) -> None:
        self._up = up
        self._load = load
        self.done: list[Cycle] = []

    async def run(self, arrival: Arrival) -> Cycle:
        """Run one cycle, from an idle replica to the next one."""
        await self._until(arrival)
        asked = [*arrival.requests, *((arrival.requests[0],) if arrival.late_s is not None else ())]
        delays_s = [0.0] * len(arrival.requests) + [arrival.late_s or 0.0]
        records = await asyncio.gather(
            *(self._ask(each, delay_s) for each, delay_s in zip(asked, delays_s, strict=False))
        )
        ready_s = await asyncio.to_thread(self._ready_since_s)
        held = [(each, record) for each, record in zip(asked, records, strict=True) if record.sent_s < ready_s]
        overheads = await self._overheads_s(ready_s, held) if held else ()
        cycle = Cycle(arrival.moment, ready_s - records[0].sent_s if held else None, overheads)
        self.done.append(cycle)
        return cycle

    async def _overheads_s(self, ready_s: float, held: list[tuple[tuple[Prompt, bool], Record]]) -> tuple[float, ...]:
        again = [await asyncio.gather(*(self._ask(each) for each, _ in held)) for _ in range(NUM_AGAIN)]
        if any(record.outcome != "complete" for record in [*(r for _, r in held), *(r for g in again for r in g)]):
            return ()
        return overheads_s(ready_s, [record for _, record in held], again)

    async def _ask(self, request: tuple[Prompt, bool], delay_s: float = 0.0) -> Record:
        await asyncio.sleep(delay_s)
        prompt, streamed = request
        return await self._load.ask(prompt, streamed=streamed)

    async def _until(self, arrival: Arrival) -> None:
        if arrival.moment == "falling":
            await asyncio.sleep(IDLE_S + arrival.delay_s)
            return
        async with asyncio.timeout(GOES_TIMEOUT_S):
            while not await asyncio.to_thread(self._has_come, arrival.moment):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        await asyncio.sleep(arrival.delay_s)

    def _has_come(self, moment: Moment) -> bool:
        ordered = self._up.scalings(NAME)
        is_ordered = bool(ordered) and ordered[-1][1] == 0
        return is_ordered and (moment == "leaving" or not self._up.replicas())

    def _ready_since_s(self) -> float:
        """Return the time since which the latest replica is ready."""
        since = [each.ready_since_s() for each in self._up.replicas().values()]
        return max((at_s for at_s in since if at_s is not None), default=float("nan"))


async def play(up: Up, url: str, args: argparse.Namespace) -> tuple[ExactLoad, list[Cycle]]:
    load = ExactLoad(url, NAME, 1, NUM_TOKENS)
    cycles, source = Cycles(up, load), random.Random(args.seed)
    try:
        await load.learn()
        while _num_cold(cycles.done) < args.cycles and not load.faults:
            cycle = await cycles.run(draw_arrival(source, load.prompts))
            progress(f"{_num_cold(cycles.done)} of {args.cycles}: {_words(cycle)}")
    finally:
        await load.close()
    return load, cycles.done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=60, help="number of cycles of real processes")
    parser.add_argument("--simulated", type=int, metavar="N", help="run N cycles in the simulator instead")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.simulated:
        simulate_cycles(args.simulated, args.seed)
        return
    with serving(DEPLOYMENT.format(name=NAME, model=MODEL, idle_s=IDLE_S), 1) as (up, url):
        load, done = asyncio.run(play(up, url, args))
        ordered = Counter(up.scalings(NAME))
    report(load, done, ordered)


def report(load: ExactLoad, done: Sequence[Cycle], ordered: Counter[tuple[int, int]]) -> None:
    colds_s = sorted(each.cold_start_s for each in done if each.cold_start_s is not None)
    overheads_ms = sorted(1000 * each for cycle in done for each in cycle.overheads_s)
    result: dict[str, Any] = {
        "num_cycles": len(colds_s),
        "num_met_awake": len(done) - len(colds_s),
        "moments": Counter(each.moment for each in done if each.cold_start_s is not None),
        "ordered": {f"{before} to {after}": count for (before, after), count in ordered.items()},
        "outcomes": load.counts(),
        "cold_starts_s": [round(each, 3) for each in colds_s],
        "overheads_ms": [round(each, 1) for each in overheads_ms],
        "faults": [each._asdict() for each in load.faults[:5]],
    }
    row = table_row(colds_s, overheads_ms, len(load.records), len(load.faults))
    emit("zero_cycles", COLUMNS, [row], result)
    print(markdown_table(COLUMNS, [row]))
    if load.faults:
        raise SystemExit(f"{len(load.faults)} of {len(load.records)} answers are not as they were: {load.faults[0]}")


def table_row(colds_s: Sequence[float], overheads_ms: Sequence[float], num_requests: int, num_failed: int) -> list[str]:
    """Return a row; the values must be sorted."""
    colds = [f"{percentile(colds_s, percent):.2f}" for percent in (50, 95)]
    overheads = [f"{percentile(overheads_ms, percent):.0f}" for percent in (50, 95, 100)]
    return [str(len(colds_s)), str(num_requests), str(num_failed), *colds, *overheads]


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the percentile by nearest rank; NaN without values."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else float("nan")


def _num_cold(done: Sequence[Cycle]) -> int:
    return sum(each.cold_start_s is not None for each in done)


def _words(cycle: Cycle) -> str:
    if cycle.cold_start_s is None:
        return f"{cycle.moment}, still awake"
    overheads = " ".join(f"{1000 * each:.0f}" for each in cycle.overheads_s)
    return f"{cycle.moment}, ready after {cycle.cold_start_s:.2f} s, overhead {overheads} ms"


if __name__ == "__main__":
    main()
