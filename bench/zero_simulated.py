"""Simulates scaling to zero and back with the real brain, queue, scheduler and autoscaler, over thousands of starts.

Visits of one to four requests, with gaps around the time that scaling to zero takes: before zero is ordered, at that
time, while the last pod drains, and long after. Runs have at most `VISITS_OF_A_RUN` visits, each with its own seed.
"""

from __future__ import annotations

import random
import sys
import time
from itertools import pairwise
from typing import NamedTuple

from report import emit, markdown_table

from pagemill_engine.config import EngineConfig
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_protocol.report.state import StepTimeParams
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.outcome import FleetOutcome
from pagemill_simulator.fleet.settings import ColdStart, FleetSettings
from pagemill_simulator.scaling.policy import ReplicaBounds
from pagemill_simulator.scaling.simulated import own
from pagemill_simulator.workloads.request import SimRequest, Workload

IDLE_S = 2.0
"""Seconds of `scaleToZeroAfter`."""
LONGEST_GAP_S = 24.0
"""Seconds between two visits: a start, the idle time, a decision and a drain take some 15 s."""
VISITS_OF_A_RUN = 500
COLD_START = ColdStart(schedule_s=0.2, pull_s=0.5, load_s=3.0, warm_s=0.5)
STEP_TIME = StepTimeParams(knots_tokens=[1, 64, 512], knot_ms=[15.0, 40.0, 200.0], decode_context_ms=1e-5)
"""Similar to the embedded model on two cores."""
ENGINE = EngineConfig(
    model="sim", num_kv_blocks=512, max_model_len=2048, max_num_seqs=8, max_num_waiting=64, step_time=STEP_TIME
)
COLUMNS = ["cycles", "requests", "refused", "lost", "TTFT p50 s", "p95 s", "max s", "virtual hours", "CPU s"]


class Totals(NamedTuple):
    num_cycles: int = 0
    num_refused: int = 0
    num_lost: int = 0
    hours: float = 0.0
    ttfts_s: tuple[float, ...] = ()

    def plus(self, outcome: FleetOutcome) -> Totals:
        endings = [each.ending for each in outcome.requests]
        return Totals(
            self.num_cycles + count_cycles(outcome),
            self.num_refused + endings.count("refused"),
            self.num_lost + endings.count("lost"),
            self.hours + outcome.duration_s / 3600,
            self.ttfts_s + tuple(each.ttft_ms / 1000 for each in outcome.requests if each.ttft_ms is not None),
        )


def visits(num_visits: int, seed: int) -> Workload:
    source, at_s, requests = random.Random(f"visits {seed}"), 0.0, []
    for _ in range(num_visits):
        at_s += source.uniform(0.5, LONGEST_GAP_S)
        for _ in range(source.choice((1, 1, 2, 4))):
            requests.append(SimRequest(at_s, source.randint(1, 300), source.randint(1, 24)))
            at_s += source.choice((0.0, 0.0, source.uniform(0.0, 1.0)))
    return Workload(name="visits", source=f"visits, seed {seed}", requests=requests, duration_s=at_s + LONGEST_GAP_S)


def simulate_visits(num_visits: int, seed: int) -> FleetOutcome:
    settings = FleetSettings(
        engine=ENGINE, bounds=ReplicaBounds(0, 1), cold_start=COLD_START, drain_timeout_s=10.0, seed=seed
    )
    return simulate_fleet(visits(num_visits, seed), settings, own(ScalingSettings("Active", 0, 1, idle_s=IDLE_S)))


def count_cycles(outcome: FleetOutcome) -> int:
    """Return how often the first replica was ordered."""
    return sum(not before.wanted and after.wanted > 0 for before, after in pairwise(outcome.timeline))


def simulate_cycles(num_cycles: int, seed: int) -> None:
    """Simulate `num_cycles` cycles. Exit with 1 if a request was lost or refused."""
    totals, begun_s = Totals(), time.process_time()
    while totals.num_cycles < num_cycles and not totals.num_refused + totals.num_lost:
        totals = totals.plus(simulate_visits(min(VISITS_OF_A_RUN, 2 * (num_cycles - totals.num_cycles)), seed))
        seed += 1
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {totals.num_cycles} of {num_cycles} cycles\n")
    cpu_s = time.process_time() - begun_s
    ttfts_s = sorted(totals.ttfts_s)
    num_requests = len(ttfts_s) + totals.num_refused + totals.num_lost
    middle, high = (ttfts_s[len(ttfts_s) * percent // 100] for percent in (50, 95))
    row = [totals.num_cycles, num_requests, totals.num_refused, totals.num_lost]
    texts = [f"{value:.2f}" for value in (middle, high, ttfts_s[-1], totals.hours)]
    emit("zero_simulated", COLUMNS, [[*row, *texts, f"{cpu_s:.0f}"]], totals._replace(ttfts_s=())._asdict())
    print(markdown_table(COLUMNS, [[*row, *texts, f"{cpu_s:.0f}"]]))
    if totals.num_refused or totals.num_lost:
        raise SystemExit(f"{totals.num_refused} requests were refused and {totals.num_lost} lost")


if __name__ == "__main__":
    simulate_cycles(int(sys.argv[1]), 1)
