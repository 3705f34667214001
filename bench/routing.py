"""Measures the latencies of each routing policy over many seeds of four kinds of traffic, in virtual time.

Four pods with the real scheduler, KV manager and frames are behind the real brain. Prints mean and p99 TTFT of every
policy, the cached share of the prompts, how exactly that was predicted, and the ratio of the mean TTFT to
LeastRequest's with its 95 % interval over the seeds. For the policy that predicts the time to the first token, a second
table shows the error by load: the same traffic at lower and at higher rates. Runs are deterministic.
"""

from __future__ import annotations

import argparse
import math
import statistics

from report import emit

from pagemill_engine.config import EngineConfig
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_routing.policies.registry import BUILT_IN
from pagemill_simulator.adapters import AdapterSettings
from pagemill_simulator.conversations import TRAFFIC, at_rate
from pagemill_simulator.engine import Percentiles
from pagemill_simulator.fleet.routing_report import RoutingReport, report_routing
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.scaling.policy import ReplicaBounds

STEP_TIME = StepTimeParams(
    knots_tokens=[1, 64, 512, 2048], knot_ms=[6.0, 8.0, 22.0, 80.0], decode_context_ms=1e-5, chunk_context_ms=1e-7
)
"""Similar to an 8B model on one data-centre GPU."""
POLICIES = tuple(each.name for each in BUILT_IN)
BASELINE: str = "LeastRequest"
BUDGET = 512
"""Tokens of a full step."""
BANDS = {"low": 0.5, "middle": 1.0, "high": 1.7}
"""Multiples of the traffic's own rate."""


def fleet(num_pods: int, policy: str, seed: int, adapters: AdapterSettings | None = None) -> FleetSettings:
    engine = EngineConfig(
        model="sim",
        num_kv_blocks=2500,
        max_model_len=16384,
        max_num_seqs=48,
        max_num_batched_tokens=BUDGET,
        max_num_waiting=100_000,
        vocab_size=32000,
        step_time=STEP_TIME,
    )
    bounds = ReplicaBounds(num_pods, num_pods)
    return FleetSettings(engine=engine, bounds=bounds, routing_policy=policy, seed=seed, adapters=adapters)


def run(kind: str, policy: str, seed: int, num_pods: int, rate: float = 1.0) -> RoutingReport:
    return report_routing(at_rate(TRAFFIC[kind](seed), rate), fleet(num_pods, policy, seed))


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval, by the normal approximation."""
    if len(ratios) < 2:
        return ratios[0], 0.0
    return statistics.mean(ratios), 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))


def summary(reports: list[RoutingReport], ratios: list[float]) -> dict[str, float | None]:
    ttfts = [ttft for report in reports for ttft in report.ttft_ms]
    errors = [abs(error) for report in reports for error in report.ttft_errors]
    ratio, half_width = interval(ratios)
    return {
        "ttft_mean_ms": sum(ttfts) / len(ttfts),
        "ttft_p99_ms": Percentiles.of(ttfts).p99,
        "tpot_mean_ms": statistics.mean(tpot for report in reports for tpot in report.tpot_ms),
        "cached_share": sum(r.num_cached_tokens for r in reports) / sum(r.num_prompt_tokens for r in reports),
        "exact_share": sum(report.num_exact for report in reports) / len(ttfts),
        "ttft_error_p50": statistics.median(errors) if errors else None,
        "vs_least_request": ratio,
        "vs_least_request_95": half_width,
    }


def prediction(reports: list[RoutingReport], num_pods: int) -> dict[str, float]:
    """Return the errors of the predicted times to the first token, and the load."""
    errors = [error for report in reports for error in report.ttft_errors]
    sizes = sorted(abs(error) for error in errors)
    tokens_per_s = num_pods * BUDGET / StepTimeModel.from_params(STEP_TIME).predict_ms(BUDGET) * 1000
    num_computed = sum(report.num_prompt_tokens - report.num_cached_tokens for report in reports)
    return {
        "prefill_load": num_computed / tokens_per_s / sum(report.duration_s for report in reports),
        "ttft_mean_ms": statistics.mean(ttft for report in reports for ttft in report.ttft_ms),
        "error_p50": statistics.median(sizes),
        "error_p90": sizes[len(sizes) * 9 // 10],
        "error_mean": statistics.mean(sizes),
        "bias_mean": statistics.mean(errors),
    }


def print_predictions(kinds: list[str], seeds: range, num_pods: int) -> None:
    rows, results = [], {}
    for kind in kinds:
        for band, rate in BANDS.items():
            figures = prediction([run(kind, "Cost", seed, num_pods, rate) for seed in seeds], num_pods)
            results[f"{kind}: {band}"] = figures
            rows.append([f"{kind}: {band}", *(f"{value:.3g}" for value in figures.values())])
    emit("prediction", ["traffic: load", *figures], rows, {"seeds": len(seeds), "pods": num_pods, "figures": results})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--pods", type=int, default=4)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--traffic", nargs="+", choices=list(TRAFFIC), default=list(TRAFFIC))
    args = parser.parse_args()
    rows, results = [], {}
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for kind in args.traffic:
        base = [run(kind, BASELINE, seed, args.pods) for seed in seeds]
        for policy in args.policies:
            reports = base if policy == BASELINE else [run(kind, policy, seed, args.pods) for seed in seeds]
            ratios = [one.mean_ttft_ms / other.mean_ttft_ms for one, other in zip(reports, base, strict=True)]
            figures = summary(reports, ratios)
            results[f"{kind}: {policy}"] = figures
            rows.append([f"{kind}: {policy}", *("" if value is None else f"{value:.3g}" for value in figures.values())])
    columns = ["traffic: policy", *figures]
    emit("routing", columns, rows, {"seeds": args.seeds, "pods": args.pods, "figures": results})
    if "Cost" in args.policies:
        print_predictions(args.traffic, seeds, args.pods)


if __name__ == "__main__":
    main()
