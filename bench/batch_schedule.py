"""Measures how much lines of a batch delay live requests, in virtual time: the machine's load has no effect.

Two engines behind the gateway's real brain (placement, queue, and the rule of when a line may start), each with the
real scheduler and given step times; the network takes a millisecond each way, and there is no HTTP. Live requests
arrive at random at 80 % of the capacity, which is measured first. The result is the 95th percentile of the TTFT,
compared with the same arrivals without a batch, and the batch's tokens as a share of the capacity minus the live
tokens. `bench/batch_effect.py` measures the whole system on an idle machine.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import quantiles
from typing import NamedTuple

import msgspec
from report import emit

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import StepOutputs
from pagemill_gateway.batches.idle import POLL_S
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.report.state import StateFrame, StepTimeParams
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import LOW_PRIORITY, SamplingParams
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.interface import Assignment, CompletedRequest, QueueTicket, RoutingRequest
from pagemill_routing.config import RoutingConfig
from pagemill_servers.keys.caller import Caller
from pagemill_simulator.events import Events, EventsLoop
from pagemill_simulator.pod import NETWORK_S, RunningPod, SimulatedPod

MODEL, NUM_ENGINES, MAX_SEQS, PROMPT_TOKENS, OUTPUT_TOKENS = "sim", 2, 16, 103, 48
STEP_TIME = StepTimeParams(knots_tokens=[1, 256], knot_ms=[30.0, 60.0])
LOAD, GOAL = 0.8, 1.05
BATCH_PRIORITY = Caller(is_batch=True).priority(0)


class Lines(NamedTuple):
    """The priorities of batch lines, which may mark them as low-priority at the gateway and at the engines."""

    name: str
    at_gateway: int
    at_engines: int


KEEP, HALF, FULL = (
    Lines("lines keep their slots", LOW_PRIORITY - 1, LOW_PRIORITY - 1),
    Lines("low priority at engines only", LOW_PRIORITY - 1, BATCH_PRIORITY),
    Lines("low priority at gateway and engines", BATCH_PRIORITY, BATCH_PRIORITY),
)


@dataclass
class Outcome:
    ttft_ms: list[float] = field(default_factory=list)
    num_live: int = 0
    num_lines: int = 0


@dataclass
class Running:
    is_line: bool
    arrived_s: float
    choice: Assignment
    has_begun: bool = False


class Fleet:
    """Engines and their gateway in virtual time. `max_load` 0 means no batch."""

    def __init__(self, max_load: float, lines: Lines, rate: float | None, seed: int) -> None:
        """Create a fleet with `rate` live requests per second; None: all sequence slots are always busy."""
        self._events = Events()
        self._loop = EventsLoop(self._events)
        self._max_load, self._lines, self._rate = max_load, lines, rate
        self._arrivals, self._prompts = random.Random(seed), random.Random(seed)
        self._names = count()
        self._running: dict[str, Running] = {}
        self.outcome = Outcome()
        self._brain = LocalBrain(RoutingConfig(), clock=self._events.now, rng=random.Random(seed))
        config = EngineConfig(model="", num_kv_blocks=8192, max_model_len=1024, max_num_seqs=MAX_SEQS, seed=1)
        config = msgspec.structs.replace(config, step_time=STEP_TIME)
        self._pods = {f"pod-{number}": self._pod(f"pod-{number}", config) for number in range(NUM_ENGINES)}
        endpoints = [Endpoint(id=name, data_url=f"http://{name}", control_url=f"http://{name}") for name in self._pods]
        self._brain.observer.apply_catalog(
            Catalog(models=[CatalogModel(deployment=MODEL, name=MODEL, endpoints=endpoints)])
        )
        for name, running in self._pods.items():
            self._brain.observer.observe(name, running.pod.frame(snapshot=True))

    def run(self, seconds: float) -> Outcome:
        if self._rate is None:
            for _ in range(NUM_ENGINES * MAX_SEQS):
                self._ask(is_line=False)
        else:
            self._arrive()
        if self._max_load:
            self._poll()
        while self._events.now_s < seconds:
            self._loop.run_ready()
            self._events.step()
        self._loop.close()
        return self.outcome

    def _pod(self, name: str, config: EngineConfig) -> RunningPod:
        observe: Callable[[StateFrame], None] = partial(self._observe, name)
        return RunningPod(SimulatedPod(name, config), self._events, observe=observe, deliver=self._deliver)

    def _observe(self, name: str, frame: StateFrame) -> None:
        if self._lines.at_gateway < LOW_PRIORITY:
            frame = msgspec.structs.replace(
                frame, load=msgspec.structs.replace(frame.load, num_low_priority_requests=0)
            )
        self._brain.observer.observe(name, frame)

    def _arrive(self) -> None:
        assert self._rate is not None
        self._ask(is_line=False)
        self._events.after(self._arrivals.expovariate(self._rate), self._arrive)

    def _poll(self) -> None:
        self._loop.spawn(self._start_lines())
        self._events.after(POLL_S, self._poll)

    async def _start_lines(self) -> None:
        for _ in range(await self._brain.idle_capacity(MODEL, self._max_load)):
            self._ask(is_line=True)

    def _ask(self, *, is_line: bool) -> None:
        self._loop.spawn(self._serve(is_line, self._events.now_s))

    async def _serve(self, is_line: bool, arrived_s: float) -> None:
        priority = self._lines.at_gateway if is_line else 0
        ticket = QueueTicket(priority=priority, arrived_at=arrived_s, max_tokens=OUTPUT_TOKENS)
        target = self._brain.resolve(MODEL)
        choice = await self._brain.choose(target, frozenset(), RoutingRequest(PROMPT_TOKENS), ticket=ticket)
        name = f"{next(self._names)}"
        self._running[name] = Running(is_line, arrived_s, choice)
        request = GenerateRequest(
            request_id=name,
            model=MODEL,
            prompt_token_ids=[self._prompts.randrange(1000) for _ in range(PROMPT_TOKENS)],
            sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=1),
            priority=self._lines.at_engines if is_line else 0,
        )
        self._events.after(NETWORK_S, partial(self._pods[choice.endpoint_id].enter, request))
        self._events.after(2 * NETWORK_S, partial(self._brain.accepted, choice))

    def _deliver(self, outputs: StepOutputs) -> None:
        for output in outputs.outputs:
            request = self._running[output.request_id]
            if not request.has_begun:
                request.has_begun = True
                ttft_ms = 1000 * (self._events.now_s - request.arrived_s)
                self._brain.started(request.choice, ttft_ms)
                if not request.is_line:
                    self.outcome.ttft_ms.append(ttft_ms)
            if output.finish_reason is not None:
                self._end(self._running.pop(output.request_id))

    def _end(self, request: Running) -> None:
        self._brain.finished(request.choice, CompletedRequest(OUTPUT_TOKENS))
        self.outcome.num_lines += request.is_line
        self.outcome.num_live += not request.is_line
        if self._rate is None:
            self._ask(is_line=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="virtual seconds of each run")
    parser.add_argument(
        "--max-load", type=float, nargs="+", default=[0.5, 0.8], help="values of the setting batches.max_load"
    )
    args = parser.parse_args()
    seconds = args.seconds
    capacity = Fleet(0.0, FULL, None, 0).run(seconds).num_live / seconds
    alone = Fleet(0.0, FULL, LOAD * capacity, 1).run(seconds)
    rows, result = [], {}
    for max_load in args.max_load:
        for lines in (KEEP, HALF, FULL):
            found = Fleet(max_load, lines, LOAD * capacity, 1).run(seconds)
            before, beside = (quantiles(each.ttft_ms, n=20)[-1] for each in (alone, found))
            idle = capacity * seconds - found.num_live
            name = f"max_load {max_load}, {lines.name}"
            row = [round(before, 1), round(beside, 1), round(beside / before, 3), round(found.num_lines / idle, 3)]
            rows.append([name, *row])
            result[name] = dict(zip(("ttft_p95_ms", "with_batch", "ratio", "idle_share_used"), row, strict=True))
    columns = ["", "TTFT p95 ms", "with a batch", "ratio", "idle capacity used"]
    emit("batch_schedule", columns, rows, {"capacity_per_s": round(capacity, 2), **result, "goal": GOAL})


if __name__ == "__main__":
    main()
