"""Measures the effect of weighing LoRA adapter loads in routing, over many seeds, in virtual time.

Four pods as in `bench/routing.py`, each with a few adapter slots; every conversation uses one of several adapters of
unequal popularity. Loads take a fixed time and stop no running request (`pagemill_simulator.adapters`). The policy
`Cost` without its load term is the same policy on pods that do not report how long a load takes.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from report import emit
from routing import fleet, interval

from pagemill_simulator.adapters import AdapterSettings
from pagemill_simulator.conversations import TRAFFIC, among_adapters, at_rate
from pagemill_simulator.engine import Percentiles
from pagemill_simulator.fleet.routing_report import RoutingReport, report_routing

NUM_PODS = 4


class Mix(NamedTuple):
    num_adapters: int
    num_slots: int
    load_s: float


MIXES = (Mix(4, 2, 0.2), Mix(8, 2, 0.05), Mix(8, 2, 0.2), Mix(8, 2, 1.0), Mix(16, 4, 0.2), Mix(32, 4, 0.2))
KINDS: dict[str, tuple[str, bool]] = {
    "LeastRequest": ("LeastRequest", False),
    "PrefixHash": ("PrefixHash", False),
    "Cost, loads not reported": ("Cost", False),
    "Cost": ("Cost", True),
}


def run(traffic: str, mix: Mix, kind: str, seed: int, rate: float) -> RoutingReport:
    policy, reports_load_ms = KINDS[kind]
    conversations = among_adapters(at_rate(TRAFFIC[traffic](seed), rate), mix.num_adapters, seed)
    adapters = AdapterSettings(mix.num_slots, mix.load_s, reports_load_ms)
    return report_routing(conversations, fleet(NUM_PODS, policy, seed, adapters))


def summary(reports: list[RoutingReport], base: list[RoutingReport]) -> dict[str, float]:
    ttfts = [ttft for report in reports for ttft in report.ttft_ms]
    errors = sorted(abs(error) for report in reports for error in report.ttft_errors)
    ratio, half_width = interval([one.mean_ttft_ms / two.mean_ttft_ms for one, two in zip(reports, base, strict=True)])
    return {
        "loads": sum(report.num_adapter_loads for report in reports) / len(reports),
        "requests": len(ttfts) / len(reports),
        "ttft_mean_ms": sum(ttfts) / len(ttfts),
        "ttft_p99_ms": Percentiles.of(ttfts).p99,
        "ttft_error_p50": errors[len(errors) // 2] if errors else 0.0,
        "vs_least_request": ratio,
        "vs_least_request_95": half_width,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rate", type=float, default=1.0, help="multiple of the traffic's own rate")
    parser.add_argument("--traffic", nargs="+", choices=list(TRAFFIC), default=list(TRAFFIC))
    args = parser.parse_args()
    rows, results = [], {}
    for traffic in args.traffic:
        for mix in MIXES:
            reports = {
                kind: [run(traffic, mix, kind, seed, args.rate) for seed in range(1, args.seeds + 1)] for kind in KINDS
            }
            for kind, found in reports.items():
                name = f"{traffic}, {mix.num_adapters} in {mix.num_slots} slots, {mix.load_s:g} s: {kind}"
                figures = results[name] = summary(found, reports["LeastRequest"])
                rows.append([name, *(f"{value:.3g}" for value in figures.values())])
    emit("adapters", ["traffic, adapters: policy", *figures], rows, {"seeds": args.seeds, "figures": results})


if __name__ == "__main__":
    main()
