"""Runs light and burst traffic on `pagemill up` with real CPU engines: latencies, cost, a replay of every decision.

The cases are those of `bench/scaling.py`, an order of magnitude shorter, because starts are as much shorter here:
requests of fixed lengths arrive at drawn times, independently of the engines. Each engine computes with one thread, so
that a second one helps on two cores. The autoscaler's records are collected while it decides and replayed with the
policy: a decision with another result ends the bench with 1. The same traffic is also simulated, with the step times
and the cold start that the autoscaler has learned by then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import openai
from local_replicas import Up, serving
from report import emit, markdown_table
from workload import MODEL, ORDINARY_TOKENS

from pagemill.why.replaying import Replay, decide_again
from pagemill.why.sources import from_this_machine
from pagemill_engine.config import EngineConfig
from pagemill_operator.autoscaler.records import Record, encode_record
from pagemill_operator.backends.local.settings import LocalSettings
from pagemill_protocol.report.shape import shape_of
from pagemill_simulator.fleet.figures import Figures, Quantiles, figures_of
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.settings import ColdStart, FleetSettings
from pagemill_simulator.scaling.policy import ReplicaBounds
from pagemill_simulator.scaling.simulated import own
from pagemill_simulator.workloads.request import SimRequest, Workload
from pagemill_simulator.workloads.shapes import Burst, Steady

NAME = "scaled"
SLO_TTFT_MS, SLO_TPOT_MS = 2000.0, 200.0
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 32
LENGTHS: dict[str, Any] = {
    "prompt_tokens": PROMPT_TOKENS,
    "output_tokens": OUTPUT_TOKENS,
    "prompt_sigma": 0.0,
    "output_sigma": 0.0,
}
WINDOW_S = 20
POLL_S = 0.5
REQUEST_TIMEOUT_S = 120.0
SETTLE_S = 120.0
"""Seconds after the traffic for the replicas to be one again."""
DEPLOYMENT = """\
apiVersion: pagemill.dev/v1beta1
kind: LLMDeployment
metadata:
  name: {name}
spec:
  model: {{source: "{model}", name: {name}}}
  engine: {{maxModelLen: 512, maxNumSeqs: 8, kvCacheMemory: 64Mi, extraArgs: {extra}}}
  resources: {{gpus: 0, cpu: "1"}}
  rollout: {{drainTimeout: 20s}}
  autoscaling:
    minReplicas: 1
    maxReplicas: {most}
    slo: {{ttft: {ttft_ms:.0f}ms, tpot: {tpot_ms:.0f}ms}}
    behavior: {{scaleDown: {{stabilizationWindowSeconds: {window_s}}}}}
  routing: {{queue: {{timeout: 120s}}}}
"""
COLUMNS = [
    "case",
    "requests",
    "failed",
    "TTFT p50 ms",
    "p95",
    "TPOT p50 ms",
    "p95",
    "SLO met %",
    "pod-s",
    "most",
    "ups",
    "downs",
    "decisions",
    "equal",
]


class Served(NamedTuple):
    ttft_ms: float | None
    """Milliseconds to the first token; None: the request failed."""
    tpot_ms: float | None

    @property
    def within_slo(self) -> bool:
        if self.ttft_ms is None or self.tpot_ms is None:
            return False
        return self.ttft_ms <= SLO_TTFT_MS and self.tpot_ms <= SLO_TPOT_MS


@dataclass
class Watch:
    """Watches replicas and recorded decisions while the traffic runs."""

    up: Up
    name: str = NAME
    pod_seconds: float = 0.0
    most: int = 0
    running: int = 0
    _records: dict[float, Record] = field(default_factory=dict)
    _checked_s: float = field(default_factory=time.monotonic)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def records(self) -> list[Record]:
        """The records, oldest first."""
        return [self._records[at_s] for at_s in sorted(self._records)]

    async def run(self) -> None:
        while True:
            await asyncio.to_thread(self.look)
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(POLL_S)

    async def until_few(self, settle_s: float) -> None:
        """Wait until one replica runs, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settle_s), self._changed:
                await self._changed.wait_for(lambda: self.running <= 1)

    def look(self) -> None:
        """Count replicas and collect records: the process keeps only its latest ones."""
        now_s = time.monotonic()
        self.running = len(self.up.replicas())
        self.pod_seconds += self.running * (now_s - self._checked_s)
        self._checked_s, self.most = now_s, max(self.most, self.running)
        found = from_this_machine(LocalSettings().runtime_folder, self.name, None)
        for record in found.records if found is not None else ():
            self._records[record.signals.at_s] = record


class Outcome(NamedTuple):
    served: list[Served]
    watch: Watch
    pod_seconds: float
    """Pod-seconds until the last answer."""

    @property
    def replays(self) -> list[Replay]:
        return [decide_again(record) for record in self.watch.records]


def workloads(rate: float, factor: float, duration_s: float, seed: int) -> dict[str, Workload]:
    """Return the workloads; `rate` is what one replica absorbs, and a burst is `factor` times that for a sixth of the
    time.
    """
    burst = Burst(rate=rate, factor=factor, at_s=duration_s / 4, for_s=duration_s / 6, duration_s=duration_s, **LENGTHS)
    return {
        "light": Steady(rate=rate, duration_s=duration_s, **LENGTHS).workload(seed),
        "burst": burst.workload(seed),
    }


async def play(up: Up, workload: Workload, *, settle_s: float = SETTLE_S) -> Outcome:
    """Send every request at its time, wait for all answers, and then until one replica is left."""
    assert up.url is not None
    client = openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S)
    watch, draw = Watch(up), random.Random(0)
    watching = asyncio.create_task(watch.run())
    try:
        began_s = time.monotonic()
        served = await asyncio.gather(
            *(_send(client, each, began_s, _prompt(draw, each)) for each in workload.requests)
        )
        pod_seconds = watch.pod_seconds
        await watch.until_few(settle_s)
    finally:
        watching.cancel()
        await client.close()
    await asyncio.to_thread(watch.look)
    return Outcome(served, watch, pod_seconds)


def _prompt(draw: random.Random, request: SimRequest) -> list[int]:
    """Draw a prompt for each request, so that nothing is found in the prefix cache."""
    return [draw.choice(ORDINARY_TOKENS) for _ in range(request.num_prompt_tokens)]


async def _send(client: openai.AsyncOpenAI, request: SimRequest, began_s: float, prompt: list[int]) -> Served:
    await asyncio.sleep(max(0.0, began_s + request.arrival_s - time.monotonic()))
    sent_s, first_s, last_s = time.monotonic(), None, 0.0
    try:
        stream = await client.completions.create(
            model=NAME,
            prompt=prompt,
            max_tokens=request.num_output_tokens,
            temperature=0.0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.choices:
                last_s = time.monotonic()
                first_s = first_s or last_s
    except openai.APIError as error:
        sys.stderr.write(f"a request failed: {error}\n")
        return Served(None, None)
    if first_s is None:
        return Served(None, None)
    gaps = max(1, request.num_output_tokens - 1)
    return Served((first_s - sent_s) * 1000, (last_s - first_s) * 1000 / gaps)


def simulated(workload: Workload, records: Sequence[Record]) -> Figures | None:
    """Simulate the same traffic with what the autoscaler has learned; None if it knows no engine yet."""
    known = [(record, shape) for record in records if (shape := shape_of(record.signals.engines)) is not None]
    known = [(record, shape) for record, shape in known if shape.step_time.knots_tokens]
    if not known:
        return None
    last, shape = known[-1]
    starts = [record.signals.fleet.cold_start_s for record in records if record.signals.fleet.cold_start_s]
    engine = EngineConfig(
        model="sim",
        num_kv_blocks=shape.num_blocks,
        block_size=shape.block_size,
        max_model_len=512,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_step_tokens,
        step_time=shape.step_time,
    )
    settings = FleetSettings(
        engine=engine,
        bounds=ReplicaBounds(last.settings.min_replicas, last.settings.max_replicas),
        cold_start=_cold_start(starts[-1] if starts else None),
        drain_timeout_s=20.0,
    )
    outcome = simulate_fleet(workload, settings, own(last.settings))
    return figures_of(outcome, slo_ttft_ms=SLO_TTFT_MS, slo_tpot_ms=SLO_TPOT_MS)


def _cold_start(total_s: float | None) -> ColdStart:
    """Return a cold start of that length, with the usual shares of its phases."""
    usual = ColdStart()
    if total_s is None:
        return usual
    phases = ("schedule_s", "pull_s", "load_s", "warm_s")
    return msgspec.structs.replace(usual, **{name: getattr(usual, name) * total_s / usual.total_s for name in phases})


def row(name: str, outcome: Outcome) -> list[str]:
    served = outcome.served
    ttfts, tpots = (
        Quantiles.of(value for each in served if (value := getattr(each, field)) is not None)
        for field in ("ttft_ms", "tpot_ms")
    )
    ordered = [(each.decision.replicas, each.signals.fleet.wanted) for each in outcome.watch.records]
    replays = outcome.replays
    return [
        name,
        str(len(served)),
        str(sum(each.ttft_ms is None for each in served)),
        *_milliseconds(ttfts),
        *_milliseconds(tpots),
        f"{100 * sum(each.within_slo for each in served) / max(1, len(served)):.1f}",
        f"{outcome.pod_seconds:.0f}",
        str(outcome.watch.most),
        str(sum(after > before for after, before in ordered)),
        str(sum(after < before for after, before in ordered)),
        str(len(replays)),
        str(sum(each.is_same for each in replays)),
    ]


def simulated_row(name: str, figures: Figures) -> list[str]:
    return [
        f"{name}, simulated",
        str(figures.num_requests),
        str(figures.num_refused + figures.num_lost),
        *_milliseconds(figures.ttft_ms),
        *_milliseconds(figures.tpot_ms),
        f"{100 * (figures.slo_attained or 0.0):.1f}",
        f"{figures.pod_seconds:.0f}",
        str(figures.most_replicas),
        str(figures.num_scale_ups),
        str(figures.num_scale_downs),
        "-",
        "-",
    ]


def _milliseconds(quantiles: Quantiles) -> list[str]:
    return ["-" if value is None else f"{value:.0f}" for value in (quantiles.p50, quantiles.p95)]


def deployment(most: int, extra: Sequence[str] = ()) -> str:
    return DEPLOYMENT.format(
        name=NAME,
        model=MODEL,
        extra=json.dumps(list(extra)),
        most=most,
        ttft_ms=SLO_TTFT_MS,
        tpot_ms=SLO_TPOT_MS,
        window_s=WINDOW_S,
    )


def run(workload: Workload, content: str, *, settle_s: float = SETTLE_S) -> Outcome:
    """Run in a `pagemill up` of its own, which remembers no other traffic."""
    with serving(content, 1) as (up, _):
        return asyncio.run(play(up, workload, settle_s=settle_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["light", "burst"], choices=["light", "burst"])
    parser.add_argument("--rate", type=float, default=0.7, help="requests per second that one replica absorbs")
    parser.add_argument("--factor", type=float, default=6.0, help="rate in the burst, as a multiple of the rate")
    parser.add_argument("--duration", type=float, default=120.0, help="seconds of traffic of each case")
    parser.add_argument("--max-replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--records", type=Path, help="file for the recorded decisions, for `pagemill why --file`")
    args = parser.parse_args()
    rows, records, faults = [], list[Record](), list[str]()
    drawn = workloads(args.rate, args.factor, args.duration, args.seed)
    for name in args.cases:
        outcome = run(drawn[name], deployment(args.max_replicas))
        rows.append(row(name, outcome))
        again = simulated(drawn[name], outcome.watch.records)
        rows += [] if again is None else [simulated_row(name, again)]
        records += outcome.watch.records
        faults += [f"{name}: {each.words}" for each in outcome.replays if not each.is_same]
    if args.records is not None:
        args.records.write_bytes(b"".join(encode_record(each) + b"\n" for each in records))
    decisions = [
        [each.time, each.signals.fleet.wanted, each.decision.replicas, each.decision.message] for each in records
    ]
    emit("local_scaling", COLUMNS, rows, {"rows": rows, "decisions": decisions})
    print(markdown_table(COLUMNS, rows))
    if faults or not records:
        raise SystemExit(f"decisions that the policy does not take again: {faults or 'none was recorded'}")


if __name__ == "__main__":
    main()
