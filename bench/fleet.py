"""Measures the speed of a simulated fleet, in fast-forward and exactly, and how far their results differ.

Azure-like conversations at a steady rate over a fixed number of pods. Prints requests per CPU second (other work on the
machine does not count, but it slows down what counts), the time of an hour of that traffic and, with `--exact`, the
same for the exact fleet on the same requests, with the ratio of every figure, fast-forward over exact.
"""

from __future__ import annotations

import argparse
import time

from report import emit

from pagemill_engine.config import EngineConfig
from pagemill_protocol.report.state import StepTimeParams
from pagemill_simulator.fleet.figures import figures_of
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.scaling.fixed import FixedReplicas
from pagemill_simulator.scaling.policy import ReplicaBounds
from pagemill_simulator.scaling.simulated import rival
from pagemill_simulator.workloads.request import Workload
from pagemill_simulator.workloads.shapes import Steady

HOUR_S = 3600.0
STEP_TIME = StepTimeParams(
    knots_tokens=[1, 64, 512, 2048], knot_ms=[6.0, 8.0, 22.0, 80.0], decode_context_ms=1e-5, chunk_context_ms=1e-7
)
"""Similar to an 8B model on one data-centre GPU."""


def settings(num_pods: int) -> FleetSettings:
    engine = EngineConfig(model="sim", num_kv_blocks=4096, max_model_len=16384, step_time=STEP_TIME)
    return FleetSettings(engine=engine, bounds=ReplicaBounds(num_pods, num_pods))


def measure(workload: Workload, num_pods: int, *, fast: bool) -> dict[str, float]:
    fleet = settings(num_pods)
    begun_s = time.process_time()
    outcome = simulate_fleet(workload, fleet, rival(FixedReplicas(), fleet.bounds), fast=fast)
    cpu_s = time.process_time() - begun_s
    figures = figures_of(outcome)
    found = {
        "requests": float(len(outcome.requests)),
        "served": float(figures.num_served),
        "cpu_s": cpu_s,
        "requests_per_cpu_s": len(outcome.requests) / cpu_s,
        "cpu_min_per_hour": cpu_s * HOUR_S / workload.duration_s / 60,
        "pod_seconds": outcome.pod_seconds,
    }
    for name, quantiles in (("ttft", figures.ttft_ms), ("tpot", figures.tpot_ms)):
        found |= {f"{name}_p50_ms": quantiles.p50 or 0.0, f"{name}_p95_ms": quantiles.p95 or 0.0}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=100)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--minutes", type=float, default=2.0, help="minutes of traffic; 60 is the whole hour")
    parser.add_argument("--exact", action="store_true", help="also simulate the exact fleet")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    workload = Steady(rate=args.rate, duration_s=60 * args.minutes).workload(args.seed)
    results = {"fast-forward": measure(workload, args.pods, fast=True)}
    if args.exact:
        results["exact"] = measure(workload, args.pods, fast=False)
        results["ratio"] = {
            name: value / results["exact"][name] if results["exact"][name] else 1.0
            for name, value in results["fast-forward"].items()
        }
    columns = ["fleet", *results["fast-forward"]]
    rows = [[name, *(f"{value:.4g}" for value in row.values())] for name, row in results.items()]
    about = {"pods": args.pods, "requests_per_s": args.rate, "minutes": args.minutes, "seed": args.seed}
    emit("fleet", columns, rows, {**about, "figures": results})


if __name__ == "__main__":
    main()
