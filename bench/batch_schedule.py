"""What lines of a batch cost live requests in the engines' schedulers, in virtual time: the machine's load has no part.

Two schedulers, all real, with given step times, and the gateway's rule of when a line may start; no HTTP, no gateway.
Live requests arrive at random at 80 % of the capacity measured first, and go where fewer sequences are. Compared with
the same arrivals without a batch: the 95th percentile of the time to the first token; and the batch's tokens as a share
of the capacity less the live tokens. `bench/batch_effect.py` measures the whole, on a machine that is idle.
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import dataclass, field
from itertools import count
from statistics import quantiles

from report import emit

from pagemill_engine.scheduler.limits import SchedulerLimits
from pagemill_engine.scheduler.scheduler import Scheduler
from pagemill_engine.scheduler.step import StepResult
from pagemill_gateway.batches.idle import POLL_S
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.keys.caller import Caller
from pagemill_protocol.sampling import UNHURRIED_PRIORITY, SamplingParams
from pagemill_protocol.state import StepTimeParams
from pagemill_protocol.step_time import StepTimeModel

NUM_ENGINES, MAX_SEQS, PROMPT_TOKENS, OUTPUT_TOKENS = 2, 16, 103, 48
STEP_TIME = StepTimeParams(knots_tokens=[1, 256], knot_ms=[30.0, 60.0])
LOAD, GOAL = 0.8, 1.05
BATCH_PRIORITY = Caller(is_batch=True).priority(0)


@dataclass
class Outcome:
    ttft_ms: list[float] = field(default_factory=list)
    num_live: int = 0
    num_lines: int = 0


class Fleet:
    """Engines in virtual time. `max_load` 0: no batch."""

    def __init__(self, max_load: float, batch_priority: int, rate: float | None, seed: int) -> None:
        """`rate`: live requests a second; `None`: all sequences are always busy."""
        self.now = 0.0
        limits = SchedulerLimits(
            num_blocks=8192, block_size=16, max_model_len=1024, vocab_size=1000, max_num_seqs=MAX_SEQS, seed=1
        )
        self.engines = [Scheduler(limits, lambda: self.now) for _ in range(NUM_ENGINES)]
        self._steps = StepTimeModel.from_params(STEP_TIME)
        self._max_load, self._priority, self._rate = max_load, batch_priority, rate
        self._arrivals, self._prompts = random.Random(seed), random.Random(seed)
        self._names = count()
        self._arrived: dict[str, float] = {}
        self._busy = [False] * NUM_ENGINES
        self._events: list[tuple[float, int, str, int]] = []
        self.outcome = Outcome()

    def run(self, seconds: float) -> Outcome:
        if self._rate is None:
            for engine in range(NUM_ENGINES):
                for _ in range(MAX_SEQS):
                    self._add_live(engine)
        else:
            self._at(0.0, "arrive")
        if self._max_load:
            self._at(0.0, "poll")
        while self._events and self._events[0][0] < seconds:
            self.now, _, kind, engine = heapq.heappop(self._events)
            getattr(self, f"_on_{kind}")(engine)
        return self.outcome

    def _at(self, time_s: float, kind: str, engine: int = 0) -> None:
        heapq.heappush(self._events, (time_s, next(self._names), kind, engine))

    def _on_arrive(self, engine: int) -> None:
        assert self._rate is not None
        self._add_live(min(range(NUM_ENGINES), key=self._num_sequences))
        self._at(self.now + self._arrivals.expovariate(self._rate), "arrive")

    def _on_poll(self, engine: int) -> None:
        """At most one line for each engine at a time, as `brain.load.idle` has it."""
        if not any(each.num_waiting for each in self.engines):
            for each in range(NUM_ENGINES):
                if self._num_sequences(each) < self._max_load * MAX_SEQS:
                    self._add(each, f"line-{next(self._names)}", self._priority)
        self._at(self.now + POLL_S, "poll")

    def _on_step(self, engine: int) -> None:
        """A step begins; its end is the next event of this engine."""
        plan = self.engines[engine].schedule()
        self._busy[engine] = plan.num_tokens > 0
        if not self._busy[engine]:
            return
        ends_at = (
            self.now
            + self._steps.predict_ms(plan.num_tokens, plan.decode_context_tokens, plan.chunk_context_products) / 1000
        )
        began_at, self.now = self.now, ends_at
        self.engines[engine].update(plan, StepResult(token_ids=dict.fromkeys(plan.samples, 7)))
        for output in self.engines[engine].take_outputs():
            self._note(output.request_id, engine, is_end=output.finish_reason is not None)
        self.now = began_at
        self._at(ends_at, "step", engine)

    def _note(self, name: str, engine: int, *, is_end: bool) -> None:
        if name.startswith("live") and name in self._arrived:
            self.outcome.ttft_ms.append(1000 * (self.now - self._arrived.pop(name)))
        if not is_end:
            return
        self.outcome.num_lines += name.startswith("line")
        self.outcome.num_live += name.startswith("live")
        if self._rate is None:
            self._add_live(engine)

    def _num_sequences(self, engine: int) -> int:
        return self.engines[engine].num_running + self.engines[engine].num_waiting

    def _add_live(self, engine: int) -> None:
        name = f"live-{next(self._names)}"
        self._arrived[name] = self.now
        self._add(engine, name, 0)

    def _add(self, engine: int, name: str, priority: int) -> None:
        prompt = [self._prompts.randrange(1000) for _ in range(PROMPT_TOKENS)]
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=1)
        request = GenerateRequest(
            request_id=name, model="m", prompt_token_ids=prompt, sampling=sampling, priority=priority
        )
        self.engines[engine].add(request)
        if not self._busy[engine]:
            self._busy[engine] = True
            self._at(self.now, "step", engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of virtual time, for each run")
    parser.add_argument("--max-load", type=float, nargs="+", default=[0.5, 0.8], help="the setting batches.max_load")
    args = parser.parse_args()
    seconds = args.seconds
    capacity = Fleet(0.0, 0, None, 0).run(seconds).num_live / seconds
    alone = Fleet(0.0, 0, LOAD * capacity, 1).run(seconds)
    rows, result = [], {}
    for max_load in args.max_load:
        for how, priority in (("lines keep their places", UNHURRIED_PRIORITY - 1), ("lines give way", BATCH_PRIORITY)):
            found = Fleet(max_load, priority, LOAD * capacity, 1).run(seconds)
            before, beside = (quantiles(each.ttft_ms, n=20)[-1] for each in (alone, found))
            idle = capacity * seconds - found.num_live
            name = f"max_load {max_load}, {how}"
            row = [round(before, 1), round(beside, 1), round(beside / before, 3), round(found.num_lines / idle, 3)]
            rows.append([name, *row])
            result[name] = dict(zip(("ttft_p95_ms", "with_batch", "ratio", "idle_share_used"), row, strict=True))
    columns = ["", "TTFT p95 ms", "with a batch", "ratio", "idle capacity used"]
    emit("batch_schedule", columns, rows, {"capacity_per_s": round(capacity, 2), **result, "goal": GOAL})


if __name__ == "__main__":
    main()
