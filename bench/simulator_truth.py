"""Compares the simulator with the real engine: time to first token and per output token of the same requests.

One engine of the embedded model behind the gateway, on the CPU. It learns its step times from one trace; other traces,
of other lengths and at three loads, are then replayed on it and simulated with what it has learned. Latencies are those
that a client of the gateway sees; the simulator includes gateway, engine and network, but not the client.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from peers.process import PeerFailed
from report import emit, markdown_table, progress
from truth.compare import COLUMNS, Band, Latencies, plan_rows, rows
from truth.generator import Answer, Request, latencies
from truth.planning import Planned, compare_plan
from truth.site import RealSite, engine_of, real_site
from workload import ORDINARY_TOKENS

from pagemill_engine.config import EngineConfig
from pagemill_protocol.report.state import StepTimeParams
from pagemill_simulator.engine import EngineSimulation
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.scaling.fixed import FixedReplicas
from pagemill_simulator.scaling.policy import ReplicaBounds
from pagemill_simulator.scaling.simulated import rival
from pagemill_simulator.workloads.request import SimRequest, Workload
from pagemill_simulator.workloads.shapes import Ramp, Steady

CALIBRATION = {"prompt_tokens": 220.0, "output_tokens": 40.0, "longest_prompt": 900, "longest_output": 200}
TRACES = {"prompt_tokens": 120.0, "output_tokens": 60.0, "longest_prompt": 700, "longest_output": 240}
SIGMA = 0.7
"""Standard deviation of the logarithms of lengths."""
LOADS = {"low": 0.2, "middle": 0.4, "high": 0.7}
"""Shares of the engine's capacity."""
CROWD = 96
"""Simultaneous requests whose simulation measures the capacity."""


@dataclass
class Found:
    step_time: StepTimeParams | None = None
    bands: list[Band] = field(default_factory=list)
    plan: Planned | None = None


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes are ended and what is done is shown
    found = Found()
    try:
        with tempfile.TemporaryDirectory() as folder, real_site(Path(folder)) as site:
            fill(found, site, Path(folder), args)
    except PeerFailed as failure:
        raise SystemExit(f"the real engine failed: {failure}") from None
    finally:
        show(found, markdown=args.markdown)


def fill(found: Found, site: RealSite, folder: Path, args: argparse.Namespace) -> None:
    engine = calibrate(site, args.calibration_s, args.seed)
    found.step_time = engine.step_time
    for name, share in LOADS.items():
        if name in args.loads:
            found.bands.append(measure(site, engine, name, share, args))
    if not args.no_plan:
        found.plan = plan_beside(site, folder, args)


def show(found: Found, *, markdown: bool) -> None:
    table = rows(found.bands) + (plan_rows(*found.plan) if found.plan else [])
    if markdown:
        print(markdown_table(COLUMNS, table))
    emit("simulator_truth", COLUMNS, table, msgspec.to_builtins(found))


def calibrate(site: RealSite, seconds: float, seed: int) -> EngineConfig:
    """Replay a calibration trace that rises from low load to nearly full load and falls again."""
    rate = capacity(engine_of(site.state()), TRACES)
    ends: dict[str, Any] = {"from_rate": 0.1 * rate, "to_rate": 0.8 * rate}
    ramp = Ramp(before_s=0.0, over_s=seconds / 2, after_s=0.0, **ends, **_lengths(CALIBRATION))
    up, down = ramp.requests(seed + 100), ramp.requests(seed + 101)
    requests = up + [each._replace(arrival_s=seconds - each.arrival_s) for each in reversed(down)]
    answers = site.replay(real(requests, f"{seed} calibration"))
    engine = engine_of(site.state())
    assert engine.step_time is not None
    progress(f"calibrated by {len(answers)} requests: {msgspec.to_builtins(engine.step_time)}")
    return engine


def measure(site: RealSite, engine: EngineConfig, name: str, share: float, args: argparse.Namespace) -> Band:
    rate = share * capacity(engine, TRACES)
    workload = Steady(rate=rate, duration_s=args.seconds, **_lengths(TRACES)).workload(args.seed)
    simulated = simulate(workload, engine)
    measured = []
    for repeat in range(args.repeats):
        answers = site.replay(real(workload.requests, f"{args.seed} {name} {repeat}"))
        measured.append(latencies(answers))
        progress(f"{name}, {rate:.2f} requests/s, {len(answers)} requests, repeat {repeat}: {_summary(answers)}")
    return Band(name, rate, len(workload.requests), measured, simulated, site.state().step_time)


def plan_beside(site: RealSite, folder: Path, args: argparse.Namespace) -> Planned:
    def replay(name: str, requests: list[SimRequest]) -> list[Answer]:
        answers = site.replay(real(requests, f"{args.seed} plan {name}"))
        progress(f"plan, {name}, {len(answers)} requests: {_summary(answers)}")
        return answers

    return compare_plan(folder, replay, LOADS["middle"], args.seconds, args.seed)


def simulate(workload: Workload, engine: EngineConfig) -> Latencies:
    bounds = ReplicaBounds(1, 1)
    outcome = simulate_fleet(workload, FleetSettings(engine=engine, bounds=bounds), rival(FixedReplicas(), bounds))
    return Latencies(
        [each.ttft_ms for each in outcome.requests if each.ttft_ms is not None],
        [each.tpot_ms for each in outcome.requests if each.tpot_ms is not None],
    )


def capacity(engine: EngineConfig, lengths: dict[str, Any]) -> float:
    """Return the capacity in requests per second, from a simulation of simultaneous requests."""
    crowd = Steady(rate=CROWD, duration_s=2.0, **_lengths(lengths)).requests(0)[:CROWD]
    report = EngineSimulation([each._replace(arrival_s=0.0) for each in crowd], engine).run()
    return report.num_finished / report.duration_s


def real(requests: Sequence[SimRequest], seed: str) -> list[Request]:
    """Return prompts of ordinary tokens without common prefixes, also between replays with different seeds."""
    draw = random.Random(seed)
    return [
        Request(
            at_s=each.arrival_s,
            prompt=draw.choices(ORDINARY_TOKENS, k=each.num_prompt_tokens),
            num_tokens=each.num_output_tokens,
        )
        for each in requests
    ]


def _lengths(means: dict[str, Any]) -> dict[str, Any]:
    return {**means, "prompt_sigma": SIGMA, "output_sigma": SIGMA}


def _summary(answers: list[Answer]) -> str:
    found = latencies(answers)
    lag_ms, end_s = max(each.lag_ms for each in answers), max(each.end_s for each in answers)
    return f"{json.dumps(found.quantiles())}, at most {lag_ms:.0f} ms late, ended after {end_s:.1f} s"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-plan", action="store_true", help="leave out `pagemill plan`")
    parser.add_argument("--seconds", type=float, default=45.0, help="duration of a replayed trace in seconds")
    parser.add_argument("--calibration-s", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--markdown", action="store_true", help="also print the table for the documentation")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
