"""Simulates a day of normal traffic of four kinds, and evaluates all alerts on it: none may fire.

The fleet has the gateway's real brain and the real autoscaler, and engines in fast-forward. What a Prometheus would
scrape is counted every 30 s; `promtool` evaluates the shipped rules on it. `overload` records the opposite, on which
alerts must fire.
"""

from __future__ import annotations

import argparse
import bisect
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml
from overload import notation
from report import ROOT, emit, progress

from pagemill_engine.config import EngineConfig
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_protocol.metrics import GATEWAY_TTFT_SECONDS
from pagemill_protocol.report.state import StepTimeParams
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.outcome import Ending, Served
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.scaling.policy import FleetSnapshot, ReplicaBounds
from pagemill_simulator.scaling.simulated import own
from pagemill_simulator.workloads.generators import make_generator

RULES = ROOT / "cli" / "pagemill" / "up" / "files" / "rules.yaml"
INTERVAL_S = 30
MAX_REPLICAS, MAX_NUM_SEQS = 4, 32
BOUNDS_S = GATEWAY_TTFT_SECONDS.buckets
ENGINE = EngineConfig(
    model="sim",
    num_kv_blocks=4096,
    max_model_len=16_384,
    max_num_seqs=MAX_NUM_SEQS,
    step_time=StepTimeParams(knots_tokens=[1, 64, 512], knot_ms=[15.0, 25.0, 80.0], decode_context_ms=1e-5),
)
DAYS: dict[str, tuple[str, dict[str, str], int]] = {
    "steady": ("steady", {"rate": "1"}, 1),
    "day and night": ("diurnal", {"low_rate": "0.05", "high_rate": "3"}, 1),
    "office, from zero": ("silent-nights", {"high_rate": "2", "days": "1", "compress": "1"}, 0),
    "long prompts": ("retrieval", {"rate": "0.3"}, 1),
}
"""Workload, its parameters, and the fewest replicas."""
OUTCOMES: dict[Ending, str] = {"served": "completed", "refused": "no_capacity", "lost": "failed_after_first_token"}
MODEL, VARIANT = 'model="sim"', 'variant="default/sim"'


class Scraped:
    """A scaler that passes on every decision, and keeps what a Prometheus would scrape."""

    def __init__(self, lowest: int) -> None:
        self._policy = own(ScalingSettings("Active", lowest, MAX_REPLICAS))
        self.name, self.interval_s = self._policy.name, self._policy.interval_s
        self.wakes_at_once = self._policy.wakes_at_once
        self.series: dict[str, list[float | None]] = {}
        self.num_scrapes = 0
        self._ended = Counter[str]()
        self._first_tokens = [0] * (len(BOUNDS_S) + 1)

    def decide(self, seen: FleetSnapshot) -> int:
        if seen.at_s >= self.num_scrapes * INTERVAL_S:
            self._scrape(seen)
        return self._policy.decide(seen)

    def ended(self, request: Served) -> None:
        self._ended[OUTCOMES[request.ending]] += 1
        if request.ttft_ms is not None:
            self._first_tokens[bisect.bisect_left(BOUNDS_S, request.ttft_ms / 1000)] += 1

    def _scrape(self, seen: FleetSnapshot) -> None:
        starting = len(seen.pods) - seen.ready
        values: dict[str, float] = {
            f"pagemill_deployment_desired_replicas{{{MODEL},{VARIANT}}}": seen.wanted,
            f"pagemill_deployment_updated_replicas{{{MODEL},{VARIANT}}}": seen.ready,
            f"pagemill_deployment_max_replicas{{{MODEL},{VARIANT}}}": MAX_REPLICAS,
            f"pagemill_deployment_replicas_without_gpus{{{MODEL},{VARIANT}}}": 0,
            f"pagemill_deployment_error_budget_ratio{{{MODEL},{VARIANT}}}": 0.005,
            f'pagemill_deployment_first_token_budget_ratio{{le="2.5",{MODEL},{VARIANT}}}': 0.05,
            f'pagemill_gateway_endpoints{{phase="ready",{MODEL},{VARIANT}}}': seen.ready,
            f'pagemill_gateway_endpoints{{phase="starting",{MODEL},{VARIANT}}}': starting,
            f'pagemill_gateway_endpoints{{phase="stale",{MODEL},{VARIANT}}}': 0,
            f"pagemill_gateway_queue_requests{{{MODEL}}}": seen.num_held,
            "pagemill_gateway_ready": 1,
            'leader_election_master_status{name="llmdeployment"}': 1,
        }
        for outcome in OUTCOMES.values():
            values[f'pagemill_gateway_outcomes_total{{outcome="{outcome}",stream="true",{MODEL}}}'] = self._ended[
                outcome
            ]
        total = 0
        for bound, count in zip([*map(str, BOUNDS_S), "+Inf"], self._first_tokens, strict=True):
            total += count
            name = "pagemill_gateway_time_to_first_token_seconds"
            values[f'{name}_bucket{{le="{bound}",{MODEL},{VARIANT}}}'] = total
        values[f"pagemill_gateway_time_to_first_token_seconds_count{{{MODEL},{VARIANT}}}"] = total
        for pod in seen.pods:
            of = f'{{instance="{pod.name}",model_name="sim"}}'
            values[f"pagemill_engine_ready{of}"] = pod.is_ready
            if pod.is_ready:
                values[f"pagemill_engine_max_num_seqs{of}"] = MAX_NUM_SEQS
                values[f"vllm:kv_cache_usage_perc{of}"] = pod.load.kv_cache_usage
                values[f"vllm:num_requests_running{of}"] = pod.load.num_requests_running
                values[f"vllm:num_requests_waiting{of}"] = pod.load.num_requests_waiting
        for name, value in values.items():
            kept = self.series.setdefault(name, [])
            kept += [None] * (self.num_scrapes - len(kept))
            kept.append(float(value))
        self.num_scrapes += 1


def false_alarms(scraped: Scraped, seconds: float) -> str:
    """Evaluate the alerts; return what promtool says if one fired, else nothing."""
    inputs = [
        # The series of a removed pod end at once.
        {"series": name, "values": notation(values) + (" stale" if len(values) < scraped.num_scrapes else "")}
        for name, values in scraped.series.items()
    ]
    fired = f'count by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{seconds:.0f}s]))'
    check = {"expr": fired, "eval_time": f"{seconds:.0f}s", "exp_samples": []}
    test = {"interval": f"{INTERVAL_S}s", "input_series": inputs, "promql_expr_test": [check]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tests.yaml"
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        document = {"rule_files": [str(RULES)], "evaluation_interval": f"{INTERVAL_S}s", "tests": [test]}
        file.write_text(yaml.dump(document, Dumper=dumper))
        done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=sorted(DAYS), action="append", help="kinds of traffic (default: all)")
    parser.add_argument("--hours", type=float, default=24.0, help="hours of the day that are simulated")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rows, faults = [], []
    for kind in arguments.kind or DAYS:
        name, parameters, lowest = DAYS[kind]
        if name in ("steady", "retrieval"):
            parameters = {**parameters, "duration_s": str(3600 * arguments.hours)}
        began_s = time.perf_counter()
        scraped = Scraped(lowest)
        settings = FleetSettings(
            engine=ENGINE, bounds=ReplicaBounds(lowest, MAX_REPLICAS), start_replicas=1, seed=arguments.seed
        )
        workload = make_generator(name, parameters).workload(arguments.seed)
        outcome = simulate_fleet(workload, settings, scraped, fast=True, on_end=scraped.ended)
        fault = false_alarms(scraped, min(outcome.duration_s, 3600 * arguments.hours))
        missed = sum(each.ending != "served" for each in outcome.requests)
        most = max(point.ready for point in outcome.timeline)
        seconds = time.perf_counter() - began_s
        rows.append([kind, len(outcome.requests), missed, most, "none" if not fault else "yes", round(seconds, 1)])
        progress(f"{kind}: {fault or 'no alert'}")
        faults += [fault] if fault else []
    columns = ["traffic", "requests", "not served", "replicas at most", "false alarms", "seconds"]
    emit("normal_day", columns, rows, {"kinds": len(rows), "false_alarms": len(faults)})
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
